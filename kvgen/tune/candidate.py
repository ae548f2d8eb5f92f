"""A schedule on its way from a proposal to its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvgen.ir import Schedule
from kvgen.ir.plan import KernelPlan
from kvgen.tune.bucket import Bucket
from kvgen.tune.outcome import Outcome, Trial


@dataclass(eq=False)
class Candidate:
    """One schedule on its way; two are equal only if they are the same object."""

    schedule: Schedule
    plan: KernelPlan | None = None
    outcome: Outcome = Outcome.OK
    message: str = ""
    seconds: float = 0.0
    """Compile time."""
    paths: dict[str, str] = field(default_factory=dict)
    """CPU: shared objects by variant."""
    digests: dict[str, str] = field(default_factory=dict)
    """CPU: digests of their machine code by variant."""
    ratios: dict[str, float] = field(default_factory=dict)
    """CPU, by bucket: time over the base's in the same session, which drift of the machine leaves alone."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds by bucket."""

    def fail(self, outcome: Outcome, message: str) -> None:
        """Record how it ended."""
        self.outcome, self.message = outcome, message

    @property
    def alive(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return self.outcome is Outcome.OK

    def trial(self) -> Trial:
        """The record of it."""
        return Trial(self.schedule, self.outcome, self.message, self.seconds, dict(self.times))


def log_mean(candidate: Candidate, base: Candidate, workloads: Sequence[Bucket]) -> float:
    """Mean log of time over the base's; below 0 is faster. Infinite where a bucket is missing."""
    if any(b.name not in candidate.times for b in workloads):
        return math.inf
    return sum(math.log(candidate.times[b.name] / base.times[b.name]) for b in workloads) / len(workloads)
