"""CpuJudge: candidates are compiled here, and checked and timed in a process of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvgen.backends.cpu import machine
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, ToolchainError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.passes.abi import VARIANTS
from kvgen.tune import model
from kvgen.tune.arena import Arena
from kvgen.tune.bucket import Bucket
from kvgen.tune.build_cpu import Builder
from kvgen.tune.candidate import Candidate, log_mean
from kvgen.tune.device import device_name
from kvgen.tune.halving import FINALISTS, halve
from kvgen.tune.journal import Journal
from kvgen.tune.outcome import Outcome, Progress, Step
from kvgen.tune.race import Duel
from kvgen.tune.remote import Failure, Remote

BUDGET_S = {"quick": 0.08, "full": 0.15}
"""Seconds for each contender of the first round in a bucket; they double with each round."""

DUEL_S = {"quick": 0.8, "full": 3.0}
"""Seconds of one paired comparison."""

OP_S = {"quick": {"decode": 40.0, "prefill": 30.0, "append": 12.0}, "full": {}}
"""Seconds of an op after which no further candidate is tried (a busy machine, a slow compiler)."""

NEAR = -0.005
"""Mean log of the time over the default's above which a finalist has no prospect."""

TIE = 0.01
"""Finalists whose paired ratios differ by less are equal, and the canonical order decides."""


class CpuJudge:
    """Judges candidates by running them."""

    how = "measured"

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
        if not isinstance(backend, CpuBackend):
            raise ArgumentError(f"backend = {backend!r}: {target.name} is tuned with a CpuBackend")
        self.spec, self.record, self.target, self.backend = spec, record, target, backend
        self._effort, self._say = effort, progress
        self._threads = machine.num_threads()
        self._remote = Remote(spec, target)

    def close(self) -> None:
        """End the process that runs candidates."""
        self._remote.__exit__(None, None, None)

    def start(self, op: str, journal: Journal) -> None:
        """Begin with an op; what its journal knows is not done again."""
        self._op = op
        self._arena = Arena(op, self._remote, journal, device_name(self.target), self._rebuild)
        self._builder = Builder(self.backend, journal, self._threads)
        self._checked = 0
        self._deadline = time.monotonic() + OP_S[self._effort].get(op, math.inf)

    def rank(self, op: str, schedule: Schedule, workloads: Sequence[Bucket]) -> float:
        """The model's figure, smaller is better."""
        return model.cpu_cost(op, self.spec, self.record, schedule, self.target, workloads, self._threads)

    @property
    def late(self) -> bool:
        """Whether there is no time left to try more; two are always tried."""
        return self._checked > 1 and time.monotonic() > self._deadline

    def prove(self, candidates: Sequence[Candidate]) -> None:
        """Compile the live ones in batches, in their order; merge equal binaries; check the others.

        Those there is no time for are skipped, and recorded as such.
        """
        live = [c for c in candidates if c.alive]
        size = max(4, 2 * self._threads)
        done = [0]

        def step() -> None:
            done[0] += 1
            self._say(Step(self._op, "prove", done[0], 2 * len(live)))

        for at in range(0, len(live), size):
            group = live[at : at + size]
            if not self.late:
                self._builder.build([(c, c.plan) for c in group if c.plan is not None], step)
                self._builder.merge(group)
            for candidate in group:
                if candidate.alive and self.late:
                    candidate.fail(Outcome.SKIPPED, "no time was left to try it")
                elif candidate.alive and candidate.plan is not None:
                    self._arena.check(candidate, candidate.plan.variant)
                    self._checked += 1
                step()

    def time(self, pool: Sequence[Candidate], base: Candidate, workloads: Sequence[Bucket]) -> Candidate:
        """Halve the live candidates in every bucket; those that were in an earlier call keep their figures.

        Returns the base: another one where the given one failed. ``ToolchainError`` where all did.
        """
        count = len(workloads)
        while True:
            live = [c for c in pool if c.alive]
            if not live:
                raise ToolchainError(f"{self._op}, {base.schedule}: right, but then {base.message}")
            base = base if base.alive else live[0]
            for done, bucket in enumerate(workloads):
                self._say(Step(self._op, "race", done, count, *_best(live, base, workloads)))
                self._halve([c for c in live if c.alive and c is not base], base, bucket)
                if base.alive:
                    _scale(live, base)
            if base.alive:
                break
        self._say(Step(self._op, "race", count, count, *_best(live, base, workloads)))
        return base

    def _halve(self, rivals: Sequence[Candidate], base: Candidate, bucket: Bucket) -> None:
        budget = BUDGET_S[self._effort]

        def measure(level: int, left: Sequence[Candidate]) -> dict[Candidate, float]:
            return self._arena.measure(bucket, budget * 2**level, base, left)

        if rivals:
            halve(rivals, measure)
        else:  # nothing to compare it with; how long it takes is still wanted
            self._arena.measure(bucket, budget, base, [])

    def winner(
        self,
        pool: Sequence[Candidate],
        base: Candidate,
        workloads: Sequence[Bucket],
        order: Callable[[Schedule], tuple[int, ...]],
    ) -> Candidate:
        """The finalist with the best paired ratios to the base that loses in no bucket; else the base.

        Whichever it is, all its variants are right. ``ToolchainError`` where no candidate's are.
        """
        rivals = sorted(
            (c for c in pool if c.alive and c is not base and log_mean(c, base, workloads) < NEAR),
            key=lambda c: log_mean(c, base, workloads),
        )[:FINALISTS]
        ranked: list[tuple[float, Candidate, dict[str, Duel]]] = []
        for done, rival in enumerate(rivals):
            self._say(Step(self._op, "final", done, len(rivals), *_best(pool, base, workloads)))
            duels: dict[str, Duel] = {}
            for bucket in workloads:
                found = self._duel(base, rival, bucket)
                if found is None or found.slower:
                    break
                duels[bucket.name] = found
            if len(duels) == len(workloads) and any(d.faster for d in duels.values()):
                mean = sum(math.log(d.ratio) for d in duels.values()) / len(duels)
                ranked.append((mean, rival, duels))
        while ranked:
            best = min(mean for mean, _, _ in ranked)
            entry = min((e for e in ranked if e[0] <= best + TIE), key=lambda e: order(e[1].schedule))
            ranked.remove(entry)
            _, rival, duels = entry
            if self._check_variants(rival):
                for name, found in duels.items():
                    base.times[name], rival.ratios[name] = found.first_s, found.ratio
                _scale(pool, base)
                return rival
        # The base, unless it is wrong in a variant that was not timed; then the fastest that is right.
        others = sorted((c for c in pool if c is not base), key=lambda c: log_mean(c, base, workloads))
        for candidate in (base, *others):
            if candidate.alive and self._check_variants(candidate):
                return candidate
        raise ToolchainError(
            f"{self._op} for {self.target.name}: no schedule is right in every variant; "
            f"{base.schedule} ended as {base.outcome.value}: {base.message}"
        )

    def better(self, first: Candidate, second: Candidate, bucket: Bucket) -> bool:
        """Whether the second beats the first in paired runs of one bucket, and is right in every variant."""
        if second.times[bucket.name] > 0.97 * first.times[bucket.name]:
            return False
        found = self._duel(first, second, bucket)
        return found is not None and found.faster and self._check_variants(second)

    def _duel(self, first: Candidate, second: Candidate, bucket: Bucket) -> Duel | None:
        try:
            return self._arena.duel(bucket, DUEL_S[self._effort], first, second)
        except Failure as failure:
            what = f"{self._op}, {first.schedule}: right and timed, but then failed on {bucket.name}"
            raise ToolchainError(f"{what}: {failure.message}") from failure

    def _check_variants(self, candidate: Candidate) -> bool:
        """Build and check the variants that were not needed for the race."""
        plans = [self._plan(candidate, v) for v in VARIANTS[self._op] if v not in candidate.paths]
        self._builder.build([(candidate, plan) for plan in plans])
        return candidate.alive and all(self._arena.check(candidate, plan.variant) for plan in plans)

    def _plan(self, candidate: Candidate, variant: str) -> KernelPlan:
        return self.backend.plan(self._op, self.spec, self.record, candidate.schedule, self.target, variant)

    def _rebuild(self, candidate: Candidate, variant: str) -> None:
        self._builder.rebuild(candidate, self._plan(candidate, variant))


def _scale(pool: Sequence[Candidate], base: Candidate) -> None:
    """Seconds from ratios: as if all had run while the base took what it took last."""
    for candidate in pool:
        if candidate is not base:
            candidate.times = {
                name: ratio * base.times[name]
                for name, ratio in candidate.ratios.items()
                if name in base.times
            }


def _best(
    pool: Sequence[Candidate], base: Candidate, workloads: Sequence[Bucket]
) -> tuple[float | None, float | None]:
    """(best, default) seconds in the last bucket that has been timed."""
    timed = [b.name for b in workloads if b.name in base.times]
    if not timed:
        return None, None
    times = [c.times[timed[-1]] for c in pool if c.alive and timed[-1] in c.times]
    return min(times), base.times[timed[-1]]
