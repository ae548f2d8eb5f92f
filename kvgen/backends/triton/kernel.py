"""A compiled op: its rendered module, its binaries where the target is a GPU, and its launch path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.backends.triton.inspection import Resources, inspect_kernel
from kvgen.backends.triton.launch import arguments, launches, workspace_bytes
from kvgen.backends.triton.launch_device import interpreter, run_jit
from kvgen.backends.triton.loops import instr_per_token
from kvgen.backends.triton.source import TritonSource
from kvgen.backends.triton.store import CompiledKernel
from kvgen.ir.plan import KernelPlan


def sources(plan: KernelPlan, text: str) -> tuple[TritonSource, ...]:
    """The kernels of a rendered module with all that decides their machine code."""
    promised = plan.answers["aligned"]
    found = []
    for entry in plan.answers["kernels"]:
        aligned = {p.name for p in entry.params if p.value in promised or p.value == "workspace"}
        signature = {p.name: p.kind for p in entry.params}
        found.append(
            TritonSource(
                text=text,
                kernel=entry.name,
                signature=signature,
                aligned=frozenset(aligned),
                num_warps=entry.num_warps,
                num_stages=entry.num_stages,
                fp_fusion=entry.fp_fusion,
            )
        )
    return tuple(found)


class TritonKernel:
    """One op, ready to launch. ``compiled`` is empty for the interpreter."""

    def __init__(
        self,
        plan: KernelPlan,
        source: str,
        parts: tuple[TritonSource, ...],
        compiled: tuple[CompiledKernel, ...],
    ) -> None:
        self.plan = plan
        self.source = source
        """The rendered module."""
        self.parts = parts
        """Its kernels in launch order."""
        self.compiled = compiled
        """Their binaries in the same order."""

    def workspace(self, values: Mapping[str, Any]) -> int:
        """Bytes of workspace for these values: the states of decode's splits, 0 for other ops."""
        return workspace_bytes(self.plan, values)

    def launch(self, values: Mapping[str, Any]) -> None:
        """Run the op.

        Raises ArgumentError for values the kernels cannot take, ToolchainError with the reason where the
        target's device is not here.
        """
        by_name = {part.kernel: part for part in self.parts}
        for launch in launches(self.plan, values):
            part, given = by_name[launch.entry.name], arguments(launch, values)
            if self.plan.target.interpreted:
                interpreter().launch_source(part, launch.grid, given)
            else:
                run_jit(self.plan.target.name, part, launch, given)

    def resources(self) -> dict[str, Any]:
        """Facts from the binaries by kernel name (empty for the interpreter): registers a thread, spilled
        bytes, shared memory, and of the main loop its instructions per KV token and its loads by width."""
        return {
            part.kernel: self._facts(inspect_kernel(binary))
            for part, binary in zip(self.parts, self.compiled, strict=False)
        }

    def _facts(self, found: Resources) -> dict[str, Any]:
        loop = found.main_loop
        facts: dict[str, Any] = {
            "registers": found.registers,
            "spill_bytes": found.spill_bytes,
            "spilled_registers": found.spilled_registers,
            "shared_bytes": found.shared_bytes,
            "num_warps": found.num_warps,
            "instructions": found.instructions,
            "fingerprint": found.fingerprint,
        }
        if loop is not None:
            facts["loop"] = {
                "instructions": loop.instructions,
                "loads": dict(loop.global_loads),
                "narrow_loads": dict(loop.narrow_loads),
                "mma": dict(loop.mma),
                "local_loads": loop.local_loads,
                "barriers": loop.barriers,
            }
            if self.plan.op in ("decode", "prefill") and found.kernel != "merge_splits":
                tokens = int(self.plan.constant("TILE")) * int(self.plan.answers["unroll"])
                facts["loop"]["instr_per_token"] = round(instr_per_token(loop, found.num_warps, tokens), 2)
        return facts
