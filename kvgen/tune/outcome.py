"""What became of a candidate, what is told while tuning goes on, and the report at its end."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgen.ir import Schedule


class Outcome(enum.StrEnum):
    """How one candidate ended. All are recorded, failures too."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    """The plan, the template or the compiler refused it."""
    TIMEOUT = "timeout"
    """The compiler or the kernel did not end in time."""
    RESOURCE = "resource"
    """It spills, or needs more shared memory or registers than there are."""
    WRONG = "wrong"
    """Its result differs from the oracle's."""
    CRASH = "crash"
    """The compiler or the process that ran the kernel died."""
    LOST = "lost"
    """Its build was gone when it should have run, also after it was built again. A later run tries it."""
    DUPLICATE = "duplicate"
    """The same source or binary as an earlier candidate, which stands for it."""
    SKIPPED = "skipped"
    """There was no time left for it."""


@dataclass(frozen=True)
class Trial:
    """One candidate and its end."""

    schedule: Schedule
    outcome: Outcome
    message: str = ""
    """Why it failed, or which candidate stands for it; empty when ok."""
    seconds: float = 0.0
    """Compile time, cached or not."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds a call by bucket: medians (CPU), or the model's figure (GPU)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "schedule": self.schedule.to_dict(),
            "outcome": self.outcome.value,
            "message": self.message,
            "compile_seconds": round(self.seconds, 3),
            "times": dict(self.times),
        }


@dataclass(frozen=True)
class Step:
    """Progress, told by a callback from the thread that called ``tune``."""

    op: str
    stage: str
    """``prove``, ``race``, ``final`` or ``done`` (the op is finished, or was found in the cache)."""
    done: int
    total: int
    """Steps of this stage."""
    best_s: float | None = None
    """Seconds a call of the best candidate so far, where one has been timed."""
    default_s: float | None = None
    """The same of the default schedule."""


Progress = Callable[[Step], None]
"""What ``tune`` calls as it goes."""


@dataclass(frozen=True)
class BucketReport:
    """One workload of one op."""

    bucket: str
    schedule: Schedule
    """The winner for this workload."""
    default_s: float | None
    winner_s: float | None
    """Seconds a call; None where the default failed."""


@dataclass(frozen=True)
class OpReport:
    """What tuning one op came to."""

    op: str
    how: str
    """``measured`` (timed here) or ``predicted`` (from the compiled binary, nothing was run)."""
    cached: bool
    """Whether the answer was found in the cache and nothing was tuned."""
    default: Schedule
    winner: Schedule
    """The one schedule that a library uses for this op."""
    default_s: float | None
    winner_s: float | None
    """Geometric mean over the buckets of seconds a call; for ``predicted``, of the model's figure."""
    outcomes: Mapping[str, int]
    """Candidates by outcome; empty when cached."""
    seconds: float
    """Wall time of tuning this op."""
    buckets: tuple[BucketReport, ...]
    trials: tuple[Trial, ...] = ()
    resumed: Mapping[str, int] = field(default_factory=dict)
    """What a log of an earlier run spared, by kind: ``build``, ``check``, ``time``, ``pair``."""
    notes: tuple[str, ...] = ()
    """What else should be known, such as a torn line of that log."""

    @property
    def speedup(self) -> float | None:
        """The default's time over the winner's; 1 where the default won."""
        if self.winner == self.default:
            return 1.0
        if not self.default_s or not self.winner_s:
            return None
        return self.default_s / self.winner_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "op": self.op,
            "how": self.how,
            "cached": self.cached,
            "default": self.default.to_dict(),
            "winner": self.winner.to_dict(),
            "default_s": self.default_s,
            "winner_s": self.winner_s,
            "speedup": self.speedup,
            "outcomes": dict(self.outcomes),
            "seconds": round(self.seconds, 3),
            "buckets": [
                {
                    "bucket": b.bucket,
                    "schedule": b.schedule.to_dict(),
                    "default_s": b.default_s,
                    "winner_s": b.winner_s,
                }
                for b in self.buckets
            ],
            "trials": [trial.to_dict() for trial in self.trials],
            "resumed": dict(self.resumed),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class TuneReport:
    """The report of ``tune``."""

    spec: str
    """Name of the spec."""
    spec_hash: str
    target: str
    effort: str
    seconds: float
    ops: tuple[OpReport, ...]

    @property
    def outcomes(self) -> dict[str, int]:
        """Candidates of all ops by outcome."""
        total: Counter[str] = Counter()
        for op in self.ops:
            total.update(op.outcomes)
        return dict(sorted(total.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "spec": self.spec,
            "spec_hash": self.spec_hash,
            "target": self.target,
            "effort": self.effort,
            "seconds": round(self.seconds, 3),
            "outcomes": self.outcomes,
            "ops": [op.to_dict() for op in self.ops],
        }


def geometric_mean(values: list[float]) -> float | None:
    """The geometric mean of positive values; None of no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
