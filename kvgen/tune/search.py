"""search: the candidates of one op, from enumeration to a winner; what differs by backend is in two classes.

The winner is one schedule for all workloads, because a library holds one for each op; beside it stand the
winners of single buckets among the candidates with the same numerics knobs, for whoever dispatches by
workload. Numerics knobs (tile, split) therefore have one value for all buckets of a (spec, op).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from kvgen.backends.protocol import Backend
from kvgen.errors import ToolchainError, UnsupportedError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.ir.schedule import Knob
from kvgen.passes.render import render
from kvgen.tune import model
from kvgen.tune.outcome import BucketReport, Outcome, Progress, Trial
from kvgen.tune.space import Space
from kvgen.tune.workload import Bucket, buckets


@dataclass
class Candidate:
    """One schedule on its way."""

    schedule: Schedule
    plan: KernelPlan | None = None
    outcome: Outcome = Outcome.OK
    message: str = ""
    seconds: float = 0.0
    """Compile time."""
    paths: dict[str, str] = field(default_factory=dict)
    """CPU: shared objects by variant."""
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


@dataclass(frozen=True)
class Result:
    """What a search found."""

    winner: Schedule
    buckets: Mapping[str, BucketReport]
    """By bucket name: the winner of each."""
    general: Sequence[BucketReport]
    """The one winner's times in every bucket."""
    trials: Sequence[Trial]


class Search:
    """Tunes ops of one spec on one target; ``with`` ends the process that runs candidates."""

    def __init__(
        self,
        spec: Spec,
        record: PageRecord,
        target: Target,
        backend: Backend,
        *,
        effort: str,
        progress: Progress,
    ) -> None:
        from kvgen.tune.judge_cpu import CpuJudge
        from kvgen.tune.judge_gpu import GpuJudge

        self.spec, self.record, self.target, self.backend = spec, record, target, backend
        self.effort, self.progress = effort, progress
        kind = CpuJudge if target.backend == "cpu" else GpuJudge
        self._judge = kind(spec, record, target, backend, effort=effort, progress=progress)
        self.how, self.device = self._judge.how, self._judge.device

    def __enter__(self) -> Search:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._judge.close()

    def run(
        self,
        op: str,
        space: Space,
        facts: Mapping[str, Knob],
        default: Schedule,
        pins: Mapping[str, Knob],
        seeds: Sequence[Schedule],
    ) -> Result:
        """Tune one op. ``seeds``: schedules to try whatever the model says of them.

        Raises ``ToolchainError`` where not one candidate gives a right kernel.
        """
        workloads = buckets(op, self.effort)
        candidates = [Candidate(s) for s in self._propose(op, space, facts, default, pins, seeds, workloads)]
        self._plan(op, candidates)
        self._judge.compile(op, candidates)
        self._judge.check(op, candidates)
        alive = [c for c in candidates if c.alive]
        if not alive:
            first = candidates[0]
            raise ToolchainError(
                f"{op} for {self.target.name}: none of {len(candidates)} schedules gives a right kernel; "
                f"the first ({first.schedule}) ended as {first.outcome.value}: {first.message}"
            )
        # The default is what everything is compared with; where it failed, the first that did not.
        base = candidates[0] if candidates[0].alive else alive[0]
        base = self._judge.time(op, candidates, base, workloads)
        winner = self._judge.winner(op, candidates, base, workloads)
        rows = {b.name: self._best_of(op, candidates, winner, base, space, b) for b in workloads}
        general = [
            BucketReport(b.name, winner.schedule, *self._seconds(winner, base, candidates[0], b))
            for b in workloads
        ]
        return Result(winner.schedule, rows, general, [c.trial() for c in candidates])

    def _propose(
        self,
        op: str,
        space: Space,
        facts: Mapping[str, Knob],
        default: Schedule,
        pins: Mapping[str, Knob],
        seeds: Sequence[Schedule],
        workloads: Sequence[Bucket],
    ) -> list[Schedule]:
        trials = space.effort.get(self.effort, 1)
        pinned = dict.fromkeys(s.replace(**pins) for s in space.candidates(facts))
        allowed = [s for s in pinned if space.allows(s, facts)]
        cost = {s: self._judge.rank(op, s, workloads) for s in allowed}
        picked = model.select(space, default, allowed, trials, cost)
        extra = [s for s in seeds if s not in picked and all(s[k] == v for k, v in pins.items())]
        return [default, *extra, *picked[1:]]

    def _plan(self, op: str, candidates: Sequence[Candidate]) -> None:
        """Lower and render; the same text is the same kernel."""
        seen: dict[str, Candidate] = {}
        for candidate in candidates:
            try:
                plan = self.backend.plan(op, self.spec, self.record, candidate.schedule, self.target)
                text = fingerprint(plan, render(plan))
            except UnsupportedError as error:
                candidate.fail(Outcome.COMPILE_ERROR, str(error))
                continue
            candidate.plan = plan
            first = seen.setdefault(text, candidate)
            if first is not candidate:
                candidate.fail(Outcome.DUPLICATE, f"same source as {first.schedule}")

    def _best_of(
        self,
        op: str,
        candidates: Sequence[Candidate],
        winner: Candidate,
        base: Candidate,
        space: Space,
        bucket: Bucket,
    ) -> BucketReport:
        """The winner of one bucket among those that give the same bits as the general winner."""
        same = [
            c
            for c in candidates
            if c.alive
            and bucket.name in c.times
            and all(c.schedule[knob] == winner.schedule[knob] for knob in space.numerics)
        ]
        best = min(same, key=lambda c: (c.times[bucket.name], c is not winner), default=winner)
        if best is not winner and not self._judge.better(op, winner, best, bucket):
            best = winner
        return BucketReport(bucket.name, best.schedule, *self._seconds(best, base, candidates[0], bucket))

    @staticmethod
    def _seconds(
        best: Candidate, base: Candidate, default: Candidate, bucket: Bucket
    ) -> tuple[float | None, float | None]:
        """(default's, winner's) seconds; the default's only where it ran."""
        ran = base.times.get(bucket.name) if base is default else None
        return ran, best.times.get(bucket.name)


def fingerprint(plan: KernelPlan, text: str) -> str:
    """A rendered source without what names the schedule: equal for equal kernels."""
    text = text.replace(plan.entry, "ENTRY")
    if plan.target.backend == "cpu":
        return re.sub(r"\A(//[^\n]*\n)+", "", text)
    body = re.sub(r'\A""".*?"""', "", text, flags=re.DOTALL)
    launches = [(k.name, k.num_warps, k.num_stages) for k in plan.answers["kernels"]]
    return f"{launches}\n{body}"


def log_mean(candidate: Candidate, base: Candidate, workloads: Sequence[Bucket]) -> float:
    """Mean log of time over the base's; below 0 is faster. Infinite where a bucket is missing."""
    if any(b.name not in candidate.times for b in workloads):
        return math.inf
    return sum(math.log(candidate.times[b.name] / base.times[b.name]) for b in workloads) / len(workloads)
