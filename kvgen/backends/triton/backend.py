"""The Triton backend: plan, render, compile and launch for NVIDIA and AMD GPUs and the interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvgen import paths
from kvgen.backends.triton.kernel import TritonKernel, sources
from kvgen.backends.triton.process import toolchain_id
from kvgen.backends.triton.roomy import compile_roomy
from kvgen.errors import ToolchainError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.passes.plan_triton import plan_triton
from kvgen.passes.render import render


class TritonBackend:
    """``kvgen.backends.protocol.Backend`` for sm_80 to sm_120, gfx942 and ``interpret``."""

    def __init__(self, *, python: str = sys.executable, timeout_s: float = 300.0) -> None:
        """``python``: the interpreter whose Triton compiles; ``timeout_s``: the most one kernel may take."""
        self._python, self._timeout_s = python, timeout_s

    def space(self, op: str) -> str:
        """Name of the schedule space of ``op``."""
        return f"triton/{op}"

    def plan(
        self, op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str = ""
    ) -> KernelPlan:
        """The lowered kernel; ``UnsupportedError`` for what has no kernel."""
        return plan_triton(op, spec, record, schedule, target, variant)

    def render(self, plan: KernelPlan) -> str:
        """The readable source."""
        return render(plan)

    def compile(self, plans: Sequence[KernelPlan]) -> list[TritonKernel]:
        """Kernels for these plans, in order; compiled in parallel per target, cached on disk.

        Raises ToolchainError with the compiler's words for the first that fails, and where there is no
        Triton. Nothing is compiled for the interpreter.
        """
        toolchain_id(self._python)
        texts = [self.render(plan) for plan in plans]
        parts = [sources(plan, text) for plan, text in zip(plans, texts, strict=True)]
        kernels: dict[int, TritonKernel] = {}
        for target in dict.fromkeys(plan.target.name for plan in plans):
            chosen = [i for i, plan in enumerate(plans) if plan.target.name == target]
            if plans[chosen[0]].target.interpreted:
                kernels |= {i: TritonKernel(plans[i], texts[i], parts[i], ()) for i in chosen}
                continue
            results = iter(
                compile_roomy(
                    [part for i in chosen for part in parts[i]],
                    target,
                    cache_dir=paths.subfolder("triton"),
                    workers=os.cpu_count() or 1,
                    timeout_s=self._timeout_s,
                    python=self._python,
                )
            )
            for i in chosen:
                settled, binaries = [], []
                for part in parts[i]:
                    result = next(results)
                    if result.kernel is None:
                        what = f"{plans[i].op} ({part.kernel}) for {target}, {plans[i].schedule}"
                        raise ToolchainError(f"{what}: {result.outcome.value}: {result.message}")
                    settled.append(result.source)
                    binaries.append(result.kernel)
                kernels[i] = TritonKernel(plans[i], texts[i], tuple(settled), tuple(binaries))
        return [kernels[i] for i in range(len(plans))]
