"""The folder of compiled kernels, addressed by ``TritonSource.key``.

An entry is three files: ``<key>.cubin|hsaco``, ``<key>.ptx|amdgcn`` and, written last, ``<key>.json``
with the metadata and the sizes and digests of the other two. Each is moved into place whole and a
reader checks all of them, so there is no lock to go stale: two processes that compile the same kernel
both win, and an entry that is truncated or foreign is renamed to ``.bad`` and compiled anew.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvgen import bounded, paths, trust
from kvgen.backends.triton.arch import GpuArch
from kvgen.backends.triton.files import set_aside, write_atomically

_FORMAT = 1
_MOST_ENTRY, _MOST_FILE = 1 << 20, 1 << 28


@dataclass(frozen=True)
class KernelMetadata:
    """What a launcher and a judge need to know of a compiled kernel besides its bytes."""

    name: str
    """Symbol of the kernel in the binary."""
    shared: int
    """Dynamic shared memory of a block in bytes (measured by the compiler, never by a formula)."""
    num_warps: int
    """Warps a block."""
    num_stages: int
    """Pipeline stages asked for."""
    num_ctas: int
    """Blocks a cluster."""
    warp_size: int
    """Threads a warp."""
    tmem_size: int = 0
    """Tensor memory in columns (sm_100)."""
    global_scratch_size: int = 0
    """Bytes of global scratch a block needs (descriptors made on the device); 0 = pass null."""
    global_scratch_align: int = 1
    profile_scratch_size: int = 0
    profile_scratch_align: int = 1


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel in the store."""

    key: str
    """``TritonSource.key`` for this target and tool chain."""
    target: str
    """Architecture name, e.g. ``sm_90``."""
    toolchain: str
    """Identity of the compiler, e.g. ``triton-3.9.0``."""
    metadata: KernelMetadata
    signature: tuple[tuple[str, str], ...]
    """(name, Triton type) of the run-time arguments in launch order. Triton appends scratch pointers
    of its own; ``Resources.parameters`` gives the exact list."""
    binary_path: Path
    """The cubin or hsaco."""
    assembly_path: Path
    """The PTX or amdgcn text."""
    compile_seconds: float
    """What compiling it took, in seconds."""

    @property
    def binary(self) -> bytes:
        """The bytes to load."""
        return self.binary_path.read_bytes()

    @property
    def assembly(self) -> str:
        """PTX or amdgcn."""
        return self.assembly_path.read_text()


class _Damaged(Exception):
    """An entry that is there but cannot be trusted."""


def _paths(folder: Path, key: str, arch: GpuArch) -> tuple[Path, Path, Path]:
    base = folder / "kernels" / key[:2]
    return base / f"{key}.json", base / f"{key}.{arch.binary_suffix}", base / f"{key}.{arch.assembly_suffix}"


def _digest(data: bytes) -> dict[str, object]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def load(folder: Path, key: str, arch: GpuArch) -> CompiledKernel | None:
    """The entry of ``key``, or None where there is none. One that is damaged, or that others could have
    written, is set aside first."""
    entry_path, binary_path, assembly_path = _paths(folder, key, arch)
    if not os.path.lexists(entry_path):
        return None
    try:
        for path in (entry_path, binary_path, assembly_path):
            if reason := trust.fault(path):
                warnings.warn(f"{reason}; compiled anew", paths.CacheWarning, stacklevel=2)
                raise _Damaged(reason)
        entry = bounded.read_json(entry_path, _MOST_ENTRY)
        return _parse(entry, key, arch, binary_path, assembly_path)
    except (_Damaged, OSError, ValueError):
        for path in (entry_path, binary_path, assembly_path):
            set_aside(path)
        return None


def _parse(fields: Any, key: str, arch: GpuArch, binary_path: Path, assembly_path: Path) -> CompiledKernel:
    try:
        if fields["format"] != _FORMAT or fields["key"] != key or fields["target"] != arch.name:
            raise _Damaged("written for something else")
        for what, path in (("binary", binary_path), ("assembly", assembly_path)):
            data = bounded.read(path, _MOST_FILE, exactly=int(fields[what]["size"]))
            if fields[what] != _digest(data):
                raise _Damaged(f"the {what} is not the one described")
        return CompiledKernel(
            key, arch.name, fields["toolchain"], KernelMetadata(**fields["metadata"]),
            tuple((name, kind) for name, kind in fields["signature"]), binary_path, assembly_path,
            float(fields["compile_seconds"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _Damaged(str(error)) from error


def save(
    folder: Path, key: str, arch: GpuArch, *, toolchain: str, signature: tuple[tuple[str, str], ...],
    reply: dict[str, Any], seconds: float,
) -> CompiledKernel:  # fmt: skip
    """Store a compile worker's reply and return the entry, read back. Raises OSError."""
    entry_path, binary_path, assembly_path = _paths(folder, key, arch)
    binary, assembly = base64.b64decode(reply["binary"]), reply["assembly"].encode()
    metadata = KernelMetadata(**reply["metadata"])
    entry = {
        "format": _FORMAT, "key": key, "target": arch.name, "toolchain": toolchain,
        "metadata": asdict(metadata), "signature": signature, "compile_seconds": round(seconds, 3),
        "binary": _digest(binary), "assembly": _digest(assembly),
    }  # fmt: skip
    write_atomically(binary_path, binary)
    write_atomically(assembly_path, assembly)
    write_atomically(entry_path, (json.dumps(entry, indent=1, sort_keys=True) + "\n").encode())
    return CompiledKernel(key, arch.name, toolchain, metadata, signature, binary_path, assembly_path, seconds)
