"""Library: the six ops of one spec on one target, generated, compiled and ready to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.backends.protocol import Backend, Kernel
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
    ) -> None:
        self.spec = spec
        self.record = record
        self.target = target
        self.backend = backend
        self.schedules = dict(schedules)
        self.checked = checked
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def prepare(self) -> None:
        """Compile the default variant of all six ops, in parallel where the backend can."""
        plans = [self._plan(op, "") for op in OPS]
        for op, kernel in zip(OPS, self.backend.compile(plans), strict=True):
            self._kernels[op, ""] = self._kernels[op, kernel.plan.variant] = kernel

    def kernel(self, op: str, variant: str = "") -> Kernel:
        """The compiled kernel of ``op``; built on first use for a variant that is not the default."""
        key = (op, variant)
        if key not in self._kernels:
            self._kernels[key] = self.backend.compile([self._plan(op, variant)])[0]
        return self._kernels[key]

    def source(self, op: str, variant: str = "") -> str:
        """The rendered source of ``op``, as a person reads it."""
        return render(self._plan(op, variant))

    def resources(self, op: str, variant: str = "") -> dict[str, Any]:
        """Facts read from the compiled binary of ``op``."""
        return self.kernel(op, variant).resources()

    def _plan(self, op: str, variant: str) -> Any:
        if op not in OPS:
            raise ArgumentError(f"op = {op!r}: the ops are {', '.join(OPS)}")
        return self.backend.plan(op, self.spec, self.record, self.schedules[op], self.target, variant)

    @property
    def device(self) -> str:
        """Where caches live: ``cpu``, also for the interpreter, or ``cuda``."""
        return "cpu" if self.target.backend == "cpu" or self.target.interpreted else "cuda"
