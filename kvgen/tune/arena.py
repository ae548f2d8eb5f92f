"""arena: check and time compiled candidates of one op, unless the journal holds how that went.

Timings are kept as ratios to the base (the default) measured in the same session, in turns with it: a ratio
from an earlier run can be compared with one from now though the machine's speed has drifted. So the base runs
along, as the yardstick, whenever a rival has to be timed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvgen.tune import limits
from kvgen.tune.bucket import Bucket
from kvgen.tune.candidate import Candidate
from kvgen.tune.journal import Journal, Line
from kvgen.tune.limits import Limit, race_limit
from kvgen.tune.outcome import Outcome
from kvgen.tune.race import LEAST_ROUNDS, WARM_UP, Duel
from kvgen.tune.remote import Contender, Failure, Remote

CHECKING = 3
"""Raised whenever the check's cases or tolerances change: older verdicts are void then.

Version 1 called a build that could not be loaded wrong; version 2 took a process that did not know the names
in the spec for candidates that do not end.
"""

TIMING = 2
"""Raised whenever workloads or the way samples are taken change: older timings are void then. 1: as above."""

FAULTS = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
"""Signals of which a process dies by a fault of the code it runs."""

PROBE_S = 0.02
"""Budget of the base's first run in a bucket, from which time limits follow."""


Reply = TypeVar("Reply")


class Arena:
    """Runs the candidates of one op in a process of their own; a failure ends the candidate only.

    A build that is gone when it should run (the cache was emptied) is made again, once.
    """

    def __init__(
        self,
        op: str,
        remote: Remote,
        journal: Journal,
        device: str,
        rebuild: Callable[[Candidate, str], None],
    ) -> None:
        """``rebuild(candidate, variant)`` makes a build that is gone, and sets the candidate's path to it."""
        self.op, self.journal = op, journal
        self._rebuild = rebuild
        self._remote, self._device = remote, device
        self._check_limit = Limit(*limits.CHECK)
        self._launch_s: dict[str, float] = {}
        self._setup_s: dict[str, float] = {}

    def check(self, candidate: Candidate, variant: str) -> bool:
        """Compare one variant with the oracle; whether it is right."""
        key = {
            "binary": candidate.digests[variant],
            "variant": variant,
            "protocol": CHECKING,
            "device": self._device,
        }
        limit = self._check_limit.seconds
        line = self.journal.known("check", key, lambda line: _certain(line, limit))
        if line is None:
            line = self._check(candidate, variant, limit)
            self.journal.add("check", key, **line)
        if line["outcome"] == Outcome.OK.value:
            self._check_limit.took(line["seconds"])
            return True
        candidate.fail(Outcome(line["outcome"]), line["message"])
        return False

    def _check(self, candidate: Candidate, variant: str, limit_s: float) -> Line:
        start = time.monotonic()
        outcome, message = Outcome.OK, ""
        try:
            (verdict,) = self._ask(
                [(candidate, variant)], lambda built: self._remote.check(self.op, *built, limit_s=limit_s)
            )
            if not verdict["ok"]:
                outcome, message = Outcome.WRONG, f"{verdict['case']}: {verdict['message']}"
        except Failure as failure:
            outcome, message = failure.outcome, failure.message
        seconds = time.monotonic() - start
        return {"outcome": outcome.value, "message": message, "seconds": seconds, "limit_s": limit_s}

    def measure(
        self, bucket: Bucket, budget_s: float, base: Candidate, rivals: Sequence[Candidate]
    ) -> dict[Candidate, float]:
        """Time of each rival over the base's; who fails is missing. Empty where the base itself failed.

        ``budget_s``: seconds for each of them. Sets the base's seconds in the bucket.
        """
        found: dict[Candidate, float] = {}
        missing: list[Candidate] = []
        for candidate in (base, *rivals):
            line = self.journal.known("time", self._key(bucket, budget_s, base, candidate), _certain)
            if line is None:
                missing.append(candidate)
            elif line["outcome"] != Outcome.OK.value:
                candidate.fail(Outcome(line["outcome"]), line["message"])
            else:
                found[candidate] = line["ratio"]
                if candidate is base:
                    base.times[bucket.name] = line["seconds"]
        while missing and base.alive:
            contenders = [base, *(c for c in missing if c is not base)]
            if (times := self._race(bucket, budget_s, base, contenders)) is None:
                missing = [c for c in missing if c.alive]
                continue
            base.times[bucket.name] = times[0]
            for candidate, seconds in zip(contenders, times, strict=True):
                found[candidate] = seconds / times[0]
                if candidate in missing:
                    self._note_time(bucket, budget_s, base, candidate, seconds=seconds, base_s=times[0])
            missing = []
        found.pop(base, None)
        if not base.alive:
            return {}
        for candidate, ratio in found.items():
            candidate.ratios[bucket.name] = ratio
        return found

    def _race(
        self, bucket: Bucket, budget_s: float, base: Candidate, contenders: Sequence[Candidate]
    ) -> list[float] | None:
        """Seconds of each; None where one failed, which is recorded and out then."""
        name = bucket.name
        if name not in self._launch_s and len(contenders) > 1:
            start = time.monotonic()
            probe = self._race(bucket, PROBE_S, base, [base])
            if probe is None:
                return None
            self._setup_s[name] = time.monotonic() - start
            self._launch_s[name] = probe[0]
        limit = race_limit(
            self._launch_s.get(name),
            self._setup_s.get(name, 0.0),
            len(contenders),
            budget_s,
            WARM_UP + LEAST_ROUNDS,
        )
        try:
            times = self._ask(
                [(c, _timed(c)) for c in contenders],
                lambda built: self._remote.race(
                    self.op, bucket.sizes, built, seconds=budget_s * len(contenders), limit_s=limit
                ),
            )
        except Failure as failure:
            lost = contenders[failure.index]
            lost.fail(failure.outcome, f"on {name}: {failure.message}")
            self._note_time(bucket, budget_s, base, lost, limit_s=limit)
            return None
        if name in self._launch_s:  # the best so far sets the limits from now on
            self._launch_s[name] = min(self._launch_s[name], *times)
        return times

    def _note_time(
        self,
        bucket: Bucket,
        budget_s: float,
        base: Candidate,
        candidate: Candidate,
        *,
        seconds: float = 0.0,
        base_s: float = 0.0,
        limit_s: float = 0.0,
    ) -> None:
        self.journal.add(
            "time",
            self._key(bucket, budget_s, base, candidate),
            outcome=candidate.outcome.value,
            message=candidate.message,
            seconds=seconds,
            base_s=base_s,
            ratio=seconds / base_s if base_s else 0.0,
            limit_s=limit_s,
            schedule=candidate.schedule.to_dict(),
        )

    def duel(self, bucket: Bucket, budget_s: float, first: Candidate, second: Candidate) -> Duel | None:
        """A paired comparison; None where the second failed in it. Raises ``Failure`` where the first did."""
        key = self._key(bucket, budget_s, first, second)
        line = self.journal.known("pair", key, _certain)
        if line is None:
            line = self._pair(bucket, budget_s, first, second)
            self.journal.add("pair", key, **line)
        if line["outcome"] != Outcome.OK.value:
            second.fail(Outcome(line["outcome"]), line["message"])
            return None
        return Duel(**{field.name: line[field.name] for field in dataclasses.fields(Duel)})

    def _pair(self, bucket: Bucket, budget_s: float, first: Candidate, second: Candidate) -> Line:
        name = bucket.name
        limit = race_limit(self._launch_s.get(name), self._setup_s.get(name, 1.0), 2, 2 * budget_s, 8)
        try:
            found = self._ask(
                [(c, _timed(c)) for c in (first, second)],
                lambda built: self._remote.duel(
                    self.op, bucket.sizes, built, seconds=budget_s, limit_s=limit
                ),
            )
        except Failure as failure:
            if failure.index == 0:
                raise
            nothing = Duel(0.0, 0.0, 0.0, 0.0, False)
            message = f"on {name}: {failure.message}"
            lost: Line = {"outcome": failure.outcome.value, "message": message, "limit_s": limit}
            return lost | dataclasses.asdict(nothing)
        return {"outcome": Outcome.OK.value, "message": "", "limit_s": limit} | found

    def _ask(self, pairs: Sequence[tuple[Candidate, str]], ask: Callable[[list[Contender]], Reply]) -> Reply:
        """What ``ask`` finds of candidates and variants, which are built again where one is gone."""
        try:
            return ask([_contender(*pair) for pair in pairs])
        except Failure as failure:
            if failure.outcome is not Outcome.LOST:
                raise
        for pair in pairs:
            self._rebuild(*pair)
        return ask([_contender(*pair) for pair in pairs])

    def _key(
        self, bucket: Bucket, budget_s: float, base: Candidate, candidate: Candidate
    ) -> Mapping[str, Any]:
        return {
            "binary": candidate.digests[_timed(candidate)],
            "against": base.digests[_timed(base)],
            "bucket": bucket.name,
            "budget_s": budget_s,
            "protocol": TIMING,
            "device": self._device,
        }


def _timed(candidate: Candidate) -> str:
    """The variant that is timed: the one a library compiles first."""
    assert candidate.plan is not None
    return candidate.plan.variant


def _contender(candidate: Candidate, variant: str) -> Contender:
    return Contender(candidate.schedule, variant, {variant: candidate.paths[variant]})


def _certain(line: Line, limit_s: float = 0.0) -> bool:
    """Whether a recorded end is the candidate's own doing.

    The loss of its build is none. A time-out that came sooner than it would now is none, nor is the crash of
    a process that did not die of a fault in machine code: memory ran out, or kvgen itself had a fault that
    has been mended since.
    """
    if line["outcome"] == Outcome.TIMEOUT.value:
        return bool(line["limit_s"] >= limit_s)
    if line["outcome"] == Outcome.CRASH.value:
        return any(name in line["message"] for name in FAULTS)
    return bool(line["outcome"] != Outcome.LOST.value)
