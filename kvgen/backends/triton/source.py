"""A Triton kernel before it is compiled: everything that decides its machine code, and its key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvgen.backends.triton.arch import GpuArch
from kvgen.errors import ArgumentError

Constant = int | float | bool | str | None
"""What a ``tl.constexpr`` argument may be."""

_SCALARS = "i1 i8 i16 i32 i64 u1 u8 u16 u32 u64 fp16 bf16 fp32 fp64 fp8e4nv fp8e4b8 fp8e4b15 fp8e5 fp8e5b16"
_TYPE = re.compile(rf"constexpr|\*?k?({'|'.join(_SCALARS.split())})|tensordesc<.+>")
_KEY_FORMAT = 1


@dataclass(frozen=True)
class TritonSource:
    """One kernel to compile. Two equal sources give the same binary for the same target and Triton.

    Raises ArgumentError when the parts do not fit each other.
    """

    text: str
    """A complete Python module that defines ``@triton.jit`` kernels."""
    kernel: str
    """Name of the kernel in the module."""
    signature: Mapping[str, str]
    """Argument name -> Triton type (``*bf16``, ``*i32``, ``i64``, ``fp32``, ``constexpr``, ...), in the
    order of the kernel's parameters, which is also the order of the launch arguments."""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    """Value of every ``constexpr`` argument."""
    aligned: frozenset[str] = frozenset()
    """Arguments whose value (address or integer) is promised to be a multiple of 16."""
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    """Whether a*b+c may become one FMA. Always said: Triton 3.10 flips its default."""
    maxnreg: int | None = None
    """Upper limit of registers a thread (NVIDIA only)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", dict(self.signature))
        object.__setattr__(self, "constants", dict(self.constants))
        object.__setattr__(self, "aligned", frozenset(self.aligned))
        for name, kind in self.signature.items():
            if not _TYPE.fullmatch(kind):
                raise ArgumentError(f"signature[{name!r}] = {kind!r}: not a Triton type; e.g. '*bf16', 'i64'")
        constexprs = {name for name, kind in self.signature.items() if kind == "constexpr"}
        if constexprs != set(self.constants):
            missing = sorted(constexprs - set(self.constants))
            extra = sorted(set(self.constants) - constexprs)
            raise ArgumentError(f"constants of {self.kernel}: missing {missing}, not constexpr {extra}")
        for name, value in self.constants.items():
            if value is not None and not isinstance(value, int | float | str):
                raise ArgumentError(f"constants[{name!r}] = {value!r}: use an int, float, bool, str or None")
        if unknown := sorted(self.aligned - (set(self.signature) - constexprs)):
            raise ArgumentError(f"aligned names {unknown}: not run-time arguments of {self.kernel}")
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ArgumentError(f"num_warps = {self.num_warps}: must be a power of two")
        if self.num_stages < 1:
            raise ArgumentError(f"num_stages = {self.num_stages}: must be at least 1")

    def __hash__(self) -> int:
        return hash((self.text, self.kernel, self.num_warps, self.num_stages, self.aligned))

    @property
    def launch_arguments(self) -> tuple[tuple[str, str], ...]:
        """(name, type) of the run-time arguments, in launch order."""
        return tuple((name, kind) for name, kind in self.signature.items() if kind != "constexpr")

    def key(self, target: str, toolchain: str) -> str:
        """sha256 (64 hex digits) of all that decides the binary.

        ``target`` is an architecture name, ``toolchain`` identifies the compiler (Triton's version and
        any tool that replaces one of the wheel's).
        """
        fields = {
            "format": _KEY_FORMAT, "target": target, "toolchain": toolchain, "text": self.text,
            "kernel": self.kernel, "signature": list(self.signature.items()),
            # bool is an int to JSON's reader and 1 == 1.0, so the type's name is part of the key
            "constants": sorted((n, type(v).__name__, v) for n, v in self.constants.items()),
            "aligned": sorted(self.aligned), "num_warps": self.num_warps, "num_stages": self.num_stages,
            "fp_fusion": self.fp_fusion, "maxnreg": self.maxnreg,
        }  # fmt: skip
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def request(self, arch: GpuArch, path: Path) -> dict[str, object]:
        """The JSON message that asks a compile worker for this kernel; ``path`` holds the text."""
        position = {name: i for i, name in enumerate(self.signature)}
        return {
            "path": str(path), "kernel": self.kernel, "signature": self.signature,
            "constants": self.constants, "aligned": sorted(position[name] for name in self.aligned),
            "num_warps": self.num_warps, "num_stages": self.num_stages, "fp_fusion": self.fp_fusion,
            "maxnreg": self.maxnreg, "backend": arch.backend, "arch": arch.arch,
            "warp_size": arch.warp_size, "binary": arch.binary_suffix, "assembly": arch.assembly_suffix,
        }  # fmt: skip
