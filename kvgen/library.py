"""Library: the six ops of one spec on one target, generated, compiled and ready to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvgen.backends.protocol import Backend, Kernel
from kvgen.dispatch import Dispatch
from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import OPS
from kvgen.passes.render import render
from kvgen.runtime.ops import CacheOps


class Library(CacheOps):
    """Built by ``kvgen.build``. Holds one kernel per op and variant, compiled on first use."""

    def __init__(
        self,
        spec: Spec,
        record: PageRecord,
        target: Target,
        backend: Backend,
        schedules: Mapping[str, Schedule],
        *,
        checked: bool = True,
        workloads: Mapping[str, Mapping[str, Schedule]] = MappingProxyType({}),
    ) -> None:
        """``workloads``: by op and bucket, schedules that give the same bits as the op's own."""
        self.spec = spec
        self.record = record
        self.target = target
        self.backend = backend
        self.schedules = dict(schedules)
        self.checked = checked
        self.workloads = {op: dict(buckets) for op, buckets in workloads.items()}
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def prepare(self) -> None:
        """Compile the default variant of all six ops, in parallel where the backend can."""
        for op, kernel in zip(OPS, self._compile([(op, "") for op in OPS]), strict=True):
            self._kernels[op, ""] = self._kernels[op, kernel.plan.variant] = kernel

    def kernel(self, op: str, variant: str = "") -> Kernel:
        """The compiled kernel of ``op``; built on first use for a variant that is not the default."""
        key = (op, variant)
        if key not in self._kernels:
            self._kernels[key] = self._compile([key])[0]
        return self._kernels[key]

    def _compile(self, wanted: Sequence[tuple[str, str]]) -> list[Kernel]:
        """Kernels for ops and variants; one for each schedule of an op whose workloads have several."""
        plans = [
            [self._plan(op, variant), *(self._plan(op, variant, s) for s in self._others(op))]
            for op, variant in wanted
        ]
        made = iter(self.backend.compile([plan for group in plans for plan in group]))
        return [
            self._joined(op, [next(made) for _ in group])
            for (op, _), group in zip(wanted, plans, strict=True)
        ]

    def _others(self, op: str) -> list[Schedule]:
        """The schedules that some workloads of ``op`` have instead of the general one."""
        return [s for s in dict.fromkeys(self.workloads.get(op, {}).values()) if s != self.schedules[op]]

    def _joined(self, op: str, kernels: Sequence[Kernel]) -> Kernel:
        """One kernel for each call of ``op``: the first, or that of its workload."""
        if len(kernels) == 1:
            return kernels[0]
        by_schedule = dict(zip([self.schedules[op], *self._others(op)], kernels, strict=True))
        return Dispatch(kernels[0], {name: by_schedule[s] for name, s in self.workloads[op].items()})

    def source(self, op: str, variant: str = "") -> str:
        """The rendered source of ``op``, as a person reads it."""
        return render(self._plan(op, variant))

    def resources(self, op: str, variant: str = "") -> dict[str, Any]:
        """Facts read from the compiled binary of ``op``."""
        return self.kernel(op, variant).resources()

    def _plan(self, op: str, variant: str, schedule: Schedule | None = None) -> Any:
        if op not in OPS:
            raise ArgumentError(f"op = {op!r}: the ops are {', '.join(OPS)}")
        return self.backend.plan(
            op, self.spec, self.record, schedule or self.schedules[op], self.target, variant
        )

    def frequencies(self) -> tuple[list[float], float]:
        """What the spec's position scheme says."""
        from kvgen.variants import positions

        rope = self.spec.attention.rope
        if rope is None:
            raise ArgumentError("this spec has no [attention.rope]")
        return positions()[rope.kind].frequencies(rope)

    @property
    def device(self) -> str:
        """Where caches live: ``cpu``, also for the interpreter, or ``cuda``."""
        return "cpu" if self.target.backend == "cpu" or self.target.interpreted else "cuda"
