"""The CPU backend: plans to C++ text, to shared objects, to callable kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvgen.backends.cpu import batch, isa, loader, machine
from kvgen.backends.cpu.batch import Outcome
from kvgen.backends.cpu.job import Job
from kvgen.errors import ToolchainError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.passes.plan_cpu import plan_cpu
from kvgen.passes.render import render

EXACT_OPS = ("append", "gather", "copy")
"""Ops whose bytes are defined: a product and a sum stay two roundings."""

WITH_WORKSPACE = ("decode", "prefill")
"""Ops that export a workspace query."""


class CpuKernel:
    """One op in a loaded shared object."""

    def __init__(self, plan: KernelPlan, library: loader.Library) -> None:
        self.plan = plan
        self.library = library
        fields = loader.ArgStruct([(arg.name, arg.kind) for arg in plan.args])
        self._run = library.function(plan.entry, fields)
        self._query = (
            library.function(f"{plan.entry}_workspace", fields) if plan.op in WITH_WORKSPACE else None
        )
        self._names = tuple((arg.name, arg.kind == "ptr") for arg in plan.args)

    def workspace(self, values: Mapping[str, Any]) -> int:
        """Bytes of workspace that a launch with these values needs."""
        if self._query is None:
            return 0
        answer = np.zeros(1, dtype=np.int64)
        self._query(*self._pack({**values, "workspace": answer.ctypes.data}))
        return int(answer[0])

    def launch(self, values: Mapping[str, Any]) -> None:
        """Run on the calling thread and ``num_threads - 1`` others (default: usable cores)."""
        self._run(*self._pack(values))

    def _pack(self, values: Mapping[str, Any]) -> list[Any]:
        packed = []
        for name, pointer in self._names:
            value = values.get(name)
            if name == "num_threads":
                packed.append(machine.num_threads(value))
            elif value is None:
                packed.append(0)
            elif pointer and not isinstance(value, int):
                packed.append(value.data_ptr())
            else:
                packed.append(value)
        return packed

    def resources(self) -> dict[str, Any]:
        """Size of the shared object, the flags it was built with and what it needs of a CPU."""
        sidecar = self.library.sidecar
        return {
            "bytes": self.library.path.stat().st_size,
            "requires": list(sidecar.requires),
            "object": self.library.path.name,
        }


class CpuBackend:
    """Backend for ``cpu-avx512``, ``cpu-avx2`` and ``cpu-portable``."""

    name = "cpu"

    def __init__(self, opt: str = "-O3", sanitize: bool = False) -> None:
        self.opt = opt
        self.sanitize = sanitize

    def plan(
        self, op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str = ""
    ) -> KernelPlan:
        """The lowered kernel; see ``passes.plan_cpu``."""
        return plan_cpu(op, spec, record, schedule, target, variant)

    def space(self, op: str) -> str:
        """The schedule space of ``op``."""
        return f"cpp/{op}"

    def job(self, plan: KernelPlan) -> Job:
        """The build request of one plan."""
        return Job(
            (render(plan),),
            # GCC 12 warns about its own header's deliberately undefined vectors once they are inlined.
            (*isa.flags_for(plan.target.arch, plan.target.features), "-Wno-maybe-uninitialized"),
            self.opt,
            "off" if plan.op in EXACT_OPS else "fast",
            self.sanitize,
            f"{plan.op}-{plan.spec.hash8}",
        )

    def compile_outcomes(self, plans: Sequence[KernelPlan], workers: int = 0) -> list[Outcome]:
        """Build every plan; failures are outcomes, not exceptions (for the tuner)."""
        workers = workers or max(1, machine.num_threads())
        return batch.compile_many([self.job(plan) for plan in plans], workers=workers)

    def load(self, plan: KernelPlan, outcome: Outcome) -> CpuKernel:
        """The kernel of a successful build; ``ToolchainError`` with the compiler's words otherwise."""
        if outcome.path is None:
            raise ToolchainError(f"{plan.op} for {plan.target.name}: {outcome.message}")
        return CpuKernel(plan, loader.load(outcome.path))

    def compile(self, plans: Sequence[KernelPlan]) -> list[CpuKernel]:
        """Build and load; ``ToolchainError`` for the first that fails."""
        return [self.load(plan, done) for plan, done in zip(plans, self.compile_outcomes(plans), strict=True)]
