"""dispatch: one op, several kernels: workloads may want other knobs, as long as a result's bits are the same.

A schedule that is best for one request of 512 keys need not be for 8 of 4096. The tuner keeps the winner of
each workload beside the general one, of the same numerics knobs. Which kernel runs follows from the shapes
of a call (how many requests, how wide the page table), never from lengths: a repeated call asks only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvgen.backends.protocol import Kernel
from kvgen.ir.plan import KernelPlan
from kvgen.tune.bucket import Bucket, nearest


class Dispatch:
    """A kernel that is several: each call goes to the one of the nearest workload."""

    def __init__(self, general: Kernel, workloads: Mapping[str, Kernel]) -> None:
        """``workloads``: kernels by the names of their buckets (``1x512``), the general one among them."""
        self.plan: KernelPlan = general.plan
        self._general, self._workloads = general, dict(workloads)
        self._page = general.plan.spec.cache.page_size

    def at(self, values: Mapping[str, Any]) -> Kernel:
        """The kernel for a call."""
        sizes = values["batch"], values["table_width"] * self._page
        if min(sizes) < 1:
            return self._general
        name = nearest(Bucket(self.plan.op, sizes), self._workloads)
        return self._workloads[name] if name else self._general

    def workspace(self, values: Mapping[str, Any]) -> int:
        """Bytes of workspace for these values."""
        return self.at(values).workspace(values)

    def launch(self, values: Mapping[str, Any]) -> None:
        """Run the kernel for these values."""
        self.at(values).launch(values)

    def prepare(self, values: Mapping[str, Any], names: Sequence[str]) -> Any:
        """A repeatable call of the kernel for these values, whose shapes do not change."""
        kernel: Any = self.at(values)
        return kernel.prepare(values, names)

    def resources(self) -> dict[str, Any]:
        """Facts of the general kernel's binary."""
        return self._general.resources()
