"""The CPU backend: plans to C++ text, to shared objects, to callable kernels."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.backends.cpu import batch, isa, loader, machine
from kvgen.backends.cpu.batch import Outcome
from kvgen.backends.cpu.job import Job
from kvgen.backends.cpu.kernel import CpuKernel
from kvgen.errors import ToolchainError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.passes.plan_cpu import plan_cpu
from kvgen.passes.render import render

__all__ = ["EXACT_OPS", "CpuBackend", "CpuKernel"]

EXACT_OPS = ("append", "gather", "copy")
"""Ops whose bytes are defined: a product and a sum stay two roundings."""


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
