"""conform: every kernel against the float64 oracle on hard little caches, before anything is timed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvgen.errors import KvgenError
from kvgen.gpu_check.clock import Clock
from kvgen.gpu_check.folder import Candidate
from kvgen.gpu_check.library import CubinLibrary
from kvgen.ir import Schedule
from kvgen.ir.plan import OPS
from kvgen.passes.abi import VARIANTS
from kvgen.tune.check import check_op

FIRST_S = 20.0
"""Seconds that a check is taken to need before one has been made."""

MARGIN = 1.5
"""A check is taken to need this much more than the longest so far."""


@dataclass(frozen=True)
class Check:
    """One kernel's verdict."""

    op: str
    variant: str
    schedule: Schedule
    ok: bool
    error: float
    """Largest relative error, or the number of wrong bytes."""
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        error = self.error if math.isfinite(self.error) else None  # JSON knows no NaN
        return asdict(self) | {"schedule": self.schedule.to_dict(), "error": error}


class Conformance:
    """Checks kernels of one spec, as many as fit."""

    def __init__(self, library: CubinLibrary, clock: Clock) -> None:
        self.library, self._clock = library, clock
        self.checks: list[Check] = []
        self._longest_s = 0.0

    def defaults(self, ops: Sequence[str] = OPS) -> bool:
        """Check the default schedules in all variants; whether all that were checked are right."""
        self.library.chosen.clear()
        verdicts = [self._check(op, variant) for op in ops for variant in VARIANTS[op]]
        return False not in verdicts

    def candidate(self, candidate: Candidate) -> bool:
        """Whether a candidate is right in every variant that was prepared; False where that is not known."""
        op, schedule = candidate.plan.op, candidate.schedule
        self.library.chosen = {op: schedule}
        try:
            variants = [
                variant
                for variant in VARIANTS[op]
                if any(c.schedule == schedule for c in self.library.prepared.of(op, variant))
            ]
            return all(self._known(op, variant, schedule) for variant in variants)
        finally:
            self.library.chosen.clear()

    def _known(self, op: str, variant: str, schedule: Schedule) -> bool:
        for check in self.checks:
            if (check.op, check.variant, check.schedule) == (op, variant, schedule):
                return check.ok
        return self._check(op, variant) is True

    def _check(self, op: str, variant: str) -> bool | None:
        """The verdict, noted; None where there was no time for it."""
        schedule = self.library.candidate(op, variant).schedule
        what = f"{self.library.spec.name}: check {op} {variant}".rstrip() + f" ({schedule})"
        if not self._clock.fits(what, MARGIN * self._longest_s or FIRST_S):
            return None
        start = time.monotonic()
        try:
            verdict = check_op(self.library, op, variant)  # type: ignore[arg-type] # a live build's face
            self.library.driver.synchronize()
            check = Check(
                op, variant, schedule, verdict.ok, verdict.error, f"{verdict.case}: {verdict.message}"
            )
        except (KvgenError, RuntimeError) as error:  # a launch that fails, or torch's word on it
            check = Check(op, variant, schedule, False, float("nan"), str(error).partition("\n")[0])
        self._longest_s = max(self._longest_s, time.monotonic() - start)
        self.checks.append(check)
        return check.ok
