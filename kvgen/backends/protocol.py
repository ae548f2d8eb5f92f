"""What a backend offers: the same few verbs for CPU, Triton and the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan


class Kernel(Protocol):
    """A compiled op. One launch path for tuner, tests, runtime and exports."""

    plan: KernelPlan

    def workspace(self, values: Mapping[str, Any]) -> int:
        """Bytes of workspace that a launch with these values needs (0 for none)."""
        ...

    def launch(self, values: Mapping[str, Any]) -> None:
        """Run. ``values`` maps argument names (without ``_ptr``) to tensors, integers, floats or None."""
        ...

    def resources(self) -> dict[str, Any]:
        """Facts read from the binary: registers, spills, shared memory, loops, or code size."""
        ...


class Backend(Protocol):
    """Turns specs into kernels for one family of targets."""

    def plan(
        self, op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str = ""
    ) -> KernelPlan:
        """The fully lowered kernel; ``UnsupportedError`` for what the target cannot do."""
        ...

    def space(self, op: str) -> str:
        """Name of the schedule space of ``op``, e.g. ``cpp/decode``."""
        ...

    def compile(self, plans: Sequence[KernelPlan]) -> Sequence[Kernel]:
        """Compile plans, in parallel where that pays; ``ToolchainError`` with the compiler's words."""
        ...
