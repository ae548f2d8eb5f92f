"""search: the candidates of one op, from the model's favourites over pattern moves to a winner.

What differs by backend is in two classes, the judges. The winner is one schedule for all workloads, because
a library holds one for each op; beside it stand the winners of single buckets among the candidates with the
same numerics knobs, for a caller that dispatches by workload. Numerics knobs (tile, split) therefore have one
value for all buckets of a (spec, op).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvgen.backends.protocol import Backend
from kvgen.errors import ToolchainError, UnsupportedError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.ir.schedule import Knob
from kvgen.passes.render import render
from kvgen.tune import model, moves
from kvgen.tune.bucket import Bucket, buckets
from kvgen.tune.candidate import Candidate, log_mean
from kvgen.tune.journal import Journal
from kvgen.tune.outcome import BucketReport, Outcome, Progress, Trial
from kvgen.tune.pins import ignored
from kvgen.tune.space import Space

FIRST = 0.6
"""Share of the trials that the model proposes; the others are moves from the best."""

MOVES = 4
"""Neighbours of one point that are tried before the next look at who is best."""


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
    """Tunes ops of one spec on one target; ``close`` ends the process that runs candidates."""

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
        self.how = self._judge.how

    def close(self) -> None:
        """End the process that runs candidates."""
        self._judge.close()

    def run(
        self,
        op: str,
        space: Space,
        facts: Mapping[str, Knob],
        default: Schedule,
        pins: Mapping[str, Knob],
        seeds: Sequence[Schedule],
        journal: Journal,
    ) -> Result:
        """Tune one op. ``seeds``: schedules to try whatever the model says of them.

        Raises ``ToolchainError`` where not one candidate gives a right kernel.
        """
        # What makes no difference is not tried.
        pins = dict(pins) | {knob: default[knob] for knob in self._ignored(op, default)}
        workloads = buckets(op, self.effort)
        trials = space.effort.get(self.effort, 1)
        pool: list[Candidate] = []
        self._judge.start(op, journal)
        self._texts: dict[str, Candidate] = {}
        try:
            proposed = self._propose(op, space, facts, default, pins, seeds, workloads, trials)
            self._prove(op, pool, proposed)
            alive = [c for c in pool if c.alive]
            if not alive:
                first = pool[0]
                raise ToolchainError(
                    f"{op} for {self.target.name}: none of {len(pool)} schedules gives a right kernel; "
                    f"the first ({first.schedule}) ended as {first.outcome.value}: {first.message}"
                )
            # The default is what everything is compared with; where it failed, the first that did not.
            base = self._judge.time(pool, alive[0], workloads)
            while fresh := self._moves(op, space, facts, pins, pool, base, workloads, trials):
                self._prove(op, pool, fresh)
                base = self._judge.time(pool, base, workloads)
            winner = self._judge.winner(pool, base, workloads, space.order)
            rows = {b.name: self._best_of(pool, winner, base, space, b) for b in workloads}
        finally:
            for candidate in pool:
                self._note(journal, candidate)
        general = [
            BucketReport(b.name, winner.schedule, *self._seconds(winner, base, pool[0], b)) for b in workloads
        ]
        return Result(winner.schedule, rows, general, [c.trial() for c in pool])

    def _propose(
        self,
        op: str,
        space: Space,
        facts: Mapping[str, Knob],
        default: Schedule,
        pins: Mapping[str, Knob],
        seeds: Sequence[Schedule],
        workloads: Sequence[Bucket],
        trials: int,
    ) -> list[Schedule]:
        """The default, the seeds and the model's favourites, the most promising first."""
        allowed = list(space.candidates(facts, pins))
        cost = {s: self._judge.rank(op, s, workloads) for s in allowed}
        # A space that the trials exhaust needs no moves.
        first = trials if len(allowed) <= trials else math.ceil(FIRST * trials)
        picked = model.select(space, default, allowed, first, cost)
        idle = {knob: default[knob] for knob in self._ignored(op, default)}
        seeds = [s.replace(**idle) for s in seeds]
        extra = [s for s in seeds if s not in picked and all(s[k] == v for k, v in pins.items())]
        return [default, *extra, *picked[1:]]

    def _ignored(self, op: str, default: Schedule) -> tuple[str, ...]:
        return ignored(self.backend, op, self.spec, self.record, self.target, default)

    def _moves(
        self,
        op: str,
        space: Space,
        facts: Mapping[str, Knob],
        pins: Mapping[str, Knob],
        pool: Sequence[Candidate],
        base: Candidate,
        workloads: Sequence[Bucket],
        trials: int,
    ) -> list[Schedule]:
        """Neighbours of the best so far that were not tried; none where trials or time are spent."""
        left = trials - len(pool)
        if left <= 0 or self._judge.late:
            return []
        best = min((c for c in pool if c.alive), key=lambda c: log_mean(c, base, workloads))
        tried = {c.schedule for c in pool}
        found = list(moves.neighbours(space, facts, best.schedule, tried, pins))
        found.sort(key=lambda s: self._judge.rank(op, s, workloads))
        return found[: min(left, MOVES)]

    def _prove(self, op: str, pool: list[Candidate], schedules: Iterable[Schedule]) -> None:
        """Put schedules into the pool: planned, compiled, checked."""
        fresh = [Candidate(schedule) for schedule in schedules]
        pool += fresh
        self._plan(op, fresh)
        self._judge.prove(fresh)

    def _note(self, journal: Journal, candidate: Candidate) -> None:
        """The candidate's end, for a reader who studies what was tried."""
        trial = candidate.trial().to_dict()
        key = {"schedule": trial.pop("schedule"), "effort": self.effort}
        journal.add("trial", key, **trial)

    def _plan(self, op: str, candidates: Sequence[Candidate]) -> None:
        """Lower and render; the same text is the same kernel."""
        for candidate in candidates:
            try:
                plan = self.backend.plan(op, self.spec, self.record, candidate.schedule, self.target)
                text = fingerprint(plan, render(plan))
            except UnsupportedError as error:
                candidate.fail(Outcome.COMPILE_ERROR, str(error))
                continue
            candidate.plan = plan
            first = self._texts.setdefault(text, candidate)
            if first is not candidate:
                candidate.fail(Outcome.DUPLICATE, f"same source as {first.schedule}")

    def _best_of(
        self,
        pool: Sequence[Candidate],
        winner: Candidate,
        base: Candidate,
        space: Space,
        bucket: Bucket,
    ) -> BucketReport:
        """The winner of one bucket among those that give the same bits as the general winner."""
        same = [
            c
            for c in pool
            if c.alive
            and bucket.name in c.times
            and all(c.schedule[knob] == winner.schedule[knob] for knob in space.numerics)
        ]
        best = min(same, key=lambda c: (c.times[bucket.name], c is not winner), default=winner)
        if best is not winner and not self._judge.better(winner, best, bucket):
            best = winner
        return BucketReport(bucket.name, best.schedule, *self._seconds(best, base, pool[0], bucket))

    @staticmethod
    def _seconds(
        best: Candidate, base: Candidate, default: Candidate, bucket: Bucket
    ) -> tuple[float | None, float | None]:
        """(default's, winner's) seconds; the default's only where it ran."""
        ran = base.times.get(bucket.name) if base is default and base.alive else None
        return ran, best.times.get(bucket.name)


def fingerprint(plan: KernelPlan, text: str) -> str:
    """A rendered source without what names the schedule: equal for equal kernels."""
    text = text.replace(plan.entry, "ENTRY")
    if plan.target.backend == "cpu":
        return re.sub(r"\A(//[^\n]*\n)+", "", text)
    body = re.sub(r'\A""".*?"""', "", text, flags=re.DOTALL)
    launches = [(k.name, k.num_warps, k.num_stages) for k in plan.answers["kernels"]]
    return f"{launches}\n{body}"
