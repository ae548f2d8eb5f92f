"""What a compiled kernel uses, read from its binary on a machine without a GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvgen import bounded
from kvgen.backends.triton import amdgcn, sass
from kvgen.backends.triton.amdgcn import HsacoFacts
from kvgen.backends.triton.arch import gpu_arch
from kvgen.backends.triton.elf import CubinFacts, Parameter, cubin_facts
from kvgen.backends.triton.files import set_aside, write_atomically
from kvgen.backends.triton.loops import Instruction, Loop, find_loops
from kvgen.backends.triton.store import CompiledKernel

_FORMAT = 1


@dataclass(frozen=True)
class Resources:
    """Registers, memories and loops of one compiled kernel."""

    kernel: str
    target: str
    registers: int
    """Registers a thread (AMD: VGPRs with AGPRs)."""
    accumulators: int
    """AGPRs a thread (AMD; 0 on NVIDIA)."""
    scalar_registers: int
    """SGPRs a wavefront (AMD; 0 on NVIDIA)."""
    spill_bytes: int
    """Stack frame (NVIDIA) or scratch (AMD) of a thread in bytes. It may be used outside the loops only:
    see ``Loop.local_loads``."""
    spilled_registers: int
    """Vector registers that AMD's compiler says it spilled; NVIDIA's does not say, so 0 there."""
    shared_bytes: int
    """Dynamic shared memory (LDS) of a block in bytes."""
    tensor_memory_columns: int
    """Tensor memory of a block (sm_100)."""
    num_warps: int
    """Warps a block."""
    instructions: int
    """Instructions of the whole kernel, NOPs excluded."""
    parameters: tuple[Parameter, ...]
    """The kernel's parameter block, the scratch pointers that Triton appends included."""
    loops: tuple[Loop, ...]
    """In address order; loops that only wait for a barrier are left out."""
    fingerprint: str
    """sha256 of the machine code and of what a launch gives it: equal for equal kernels."""

    @property
    def spills(self) -> bool:
        """Whether a thread keeps registers in memory anywhere in the kernel."""
        return self.spill_bytes > 0 or self.spilled_registers > 0

    @property
    def main_loop(self) -> Loop | None:
        """The innermost loop that does most of the work, None for a kernel without loops.

        A pipelined loop (with asynchronous copies) comes before a masked twin or a rare repair; then most
        matrix instructions, an unrolled body before its remainder; then most bytes loaded where nothing is
        copied asynchronously; then the shortest.
        """
        inner = [loop for loop in self.loops if loop.innermost]
        return max(inner, key=_work, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; ``from_json`` gives an equal value back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resources:
        """Raises TypeError or KeyError where ``data`` is not what ``to_json`` wrote."""
        fields = dict(data)
        fields["parameters"] = tuple(Parameter(**p) for p in fields["parameters"])
        fields["loops"] = tuple(Loop(**loop) for loop in fields["loops"])
        return cls(**fields)


def _work(loop: Loop) -> tuple[int, int, int, int]:
    copies = loop.async_copies
    return copies > 0, sum(loop.mma.values()), 0 if copies else loop.load_bits, -loop.instructions


def inspect_kernel(kernel: CompiledKernel) -> Resources:
    """Read ``kernel``'s resources; the answer is kept beside the binary (disassembly takes 0.3 s).

    Raises ToolchainError where the binary is damaged or there is no disassembler.
    """
    path = kernel.binary_path.with_suffix(".resources.json")
    if (kept := _load(path, kernel)) is not None:
        return kept
    resources = _inspect(kernel)
    record = {"format": _FORMAT, "binary": _sha256(kernel.binary), "resources": resources.to_json()}
    write_atomically(path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    return resources


def _load(path: Path, kernel: CompiledKernel) -> Resources | None:
    try:
        record = bounded.read_json(path, 1 << 20)
        if record["format"] == _FORMAT and record["binary"] == _sha256(kernel.binary):
            return Resources.from_json(record["resources"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        set_aside(path)
    return None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _inspect(kernel: CompiledKernel) -> Resources:
    name, metadata = kernel.metadata.name, kernel.metadata
    code: list[Instruction]
    facts: CubinFacts | HsacoFacts
    if gpu_arch(kernel.target).backend == "cuda":
        facts = cubin_facts(kernel.binary, name)
        code = sass.parse(sass.disassemble(kernel.binary_path), name)
    else:
        facts = amdgcn.hsaco_facts(kernel.binary, name)
        code = amdgcn.parse(kernel.assembly, name)
    amd = facts if isinstance(facts, HsacoFacts) else None
    launch = [kernel.target, metadata.shared, metadata.num_warps, metadata.num_ctas, kernel.signature]
    return Resources(
        kernel=name,
        target=kernel.target,
        registers=facts.registers,
        accumulators=amd.accumulators if amd else 0,
        scalar_registers=amd.scalar_registers if amd else 0,
        spill_bytes=facts.frame_bytes,
        spilled_registers=amd.spilled_registers if amd else 0,
        shared_bytes=metadata.shared,
        tensor_memory_columns=metadata.tmem_size,
        num_warps=metadata.num_warps,
        instructions=sum(i.kind != "padding" for i in code),
        parameters=facts.parameters,
        loops=find_loops(code),
        fingerprint=_sha256(facts.code + json.dumps(launch).encode()),
    )
