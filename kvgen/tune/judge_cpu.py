"""CpuJudge: candidates are compiled here, and checked and timed in a process of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvgen.backends.cpu import batch, machine
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, ToolchainError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.passes.abi import VARIANTS
from kvgen.tune import model
from kvgen.tune.outcome import Outcome, Progress, Step
from kvgen.tune.race import Duel
from kvgen.tune.remote import Contender, Failure, Remote
from kvgen.tune.search import Candidate, log_mean
from kvgen.tune.workload import Bucket

RACE_S = {"quick": 3.0, "full": 12.0}
"""Seconds of one race."""

DUEL_S = {"quick": 0.8, "full": 3.0}
"""Seconds of one paired comparison."""

DUELS = 3
"""Candidates that get a paired comparison with the default before the default stays."""

OP_S = {"quick": {"decode": 40.0, "prefill": 30.0, "append": 12.0}, "full": {}}
"""Seconds of an op after which no further candidate is checked (a busy machine, a slow compiler)."""

CHECK_S = 60.0
"""Most seconds of one check, or of a race beyond its own."""

_STATUS = {
    batch.Status.OK: Outcome.OK,
    batch.Status.COMPILE_ERROR: Outcome.COMPILE_ERROR,
    batch.Status.TIMEOUT: Outcome.TIMEOUT,
}


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
        self.device = f"{_cpu_name()}, {self._threads} threads"
        self._remote = Remote(spec, target, timeout_s=CHECK_S)
        self._started = time.monotonic()

    def close(self) -> None:
        """End the process that runs candidates."""
        self._remote.__exit__(None, None, None)

    def rank(self, op: str, schedule: Schedule, workloads: Sequence[Bucket]) -> float:
        """The model's figure, smaller is better."""
        return model.cpu_cost(op, self.spec, self.record, schedule, self.target, workloads, self._threads)

    def compile(self, op: str, candidates: Sequence[Candidate]) -> None:
        """Build every live candidate's first variant."""
        self._started = time.monotonic()
        live = [(c, c.plan) for c in candidates if c.alive and c.plan is not None]
        done = [0]

        def tell(index: int, outcome: batch.Outcome) -> None:
            done[0] += 1
            self._say(Step(op, "compile", done[0], len(live)))

        found = self._build([plan for _, plan in live], tell)
        for (candidate, plan), result in zip(live, found, strict=True):
            candidate.seconds = result.seconds
            if result.path is None:
                candidate.fail(_STATUS[result.status], result.message)
            else:
                candidate.paths[plan.variant] = str(result.path)

    def _build(self, plans: Sequence[KernelPlan], tell: Any = None) -> list[batch.Outcome]:
        jobs = [self.backend.job(plan) for plan in plans]
        return batch.compile_many(jobs, workers=self._threads, on_outcome=tell)

    def check(self, op: str, candidates: list[Candidate]) -> None:
        """Check every live candidate's first variant against the oracle; drop those there is no time for."""
        live = [c for c in candidates if c.alive]
        limit = OP_S[self._effort].get(op, math.inf)
        for done, candidate in enumerate(live):
            if done > 1 and time.monotonic() - self._started > limit:
                late = {id(c) for c in live[done:]}
                candidates[:] = [c for c in candidates if id(c) not in late]
                break
            self._check(op, candidate)
            self._say(Step(op, "check", done + 1, len(live)))

    def _check(self, op: str, candidate: Candidate, variants: Sequence[str] = ()) -> None:
        contender = self._contender(candidate)
        if variants:
            contender = replace(contender, paths={v: candidate.paths[v] for v in variants})
        try:
            verdicts = self._remote.check(op, contender)
        except Failure as failure:
            candidate.fail(failure.outcome, failure.message)
            return
        for verdict in verdicts:
            if not verdict["ok"]:
                candidate.fail(Outcome.WRONG, f"{verdict['case']}: {verdict['message']}")

    def time(
        self, op: str, candidates: Sequence[Candidate], base: Candidate, workloads: Sequence[Bucket]
    ) -> Candidate:
        """Race the live candidates in every bucket; one that fails on the way costs itself only.

        Returns the base: another one where the given one failed. ``ToolchainError`` where all did.
        """
        count = len(workloads)
        for done, bucket in enumerate(workloads):
            self._say(Step(op, "race", done, count, *self._best(candidates, base, workloads)))
            while True:
                live = [c for c in candidates if c.alive]
                if not live:
                    raise ToolchainError(f"{op}, {base.schedule}: right, but then {base.message}")
                base = base if base.alive else live[0]
                try:
                    times = self._remote.race(
                        op,
                        bucket.sizes,
                        [self._contender(c) for c in live],
                        seconds=RACE_S[self._effort] if len(live) > 1 else 0.3,
                        keep=live.index(base),
                    )
                except Failure as failure:
                    live[failure.index].fail(failure.outcome, f"on {bucket.name}: {failure.message}")
                    continue
                for candidate, seconds in zip(live, times, strict=True):
                    candidate.times[bucket.name] = seconds
                break
        self._say(Step(op, "race", count, count, *self._best(candidates, base, workloads)))
        return base

    @staticmethod
    def _best(
        candidates: Sequence[Candidate], base: Candidate, workloads: Sequence[Bucket]
    ) -> tuple[float | None, float | None]:
        """(best, default) seconds in the last bucket that has been timed."""
        timed = [b.name for b in workloads if b.name in base.times]
        if not timed:
            return None, None
        times = [c.times[timed[-1]] for c in candidates if c.alive and timed[-1] in c.times]
        return min(times), base.times[timed[-1]]

    def winner(
        self, op: str, candidates: Sequence[Candidate], base: Candidate, workloads: Sequence[Bucket]
    ) -> Candidate:
        """The fastest candidate that beats the base in paired runs and loses in no bucket; else the base."""
        rivals = sorted(
            (c for c in candidates if c.alive and c is not base), key=lambda c: log_mean(c, base, workloads)
        )
        for rival in [c for c in rivals if log_mean(c, base, workloads) < -0.01][:DUELS]:
            duels = {}
            for bucket in workloads:
                found = self._duel(op, base, rival, bucket)
                if found is None or found.slower:
                    break
                duels[bucket.name] = found
            if len(duels) < len(workloads) or not any(d.faster for d in duels.values()):
                continue
            if self._check_variants(op, rival):
                for name, found in duels.items():
                    base.times[name], rival.times[name] = found.first_s, found.second_s
                return rival
        return base

    def better(self, op: str, first: Candidate, second: Candidate, bucket: Bucket) -> bool:
        """Whether the second beats the first in paired runs of one bucket, and is right in every variant."""
        if second.times[bucket.name] > 0.97 * first.times[bucket.name]:
            return False
        found = self._duel(op, first, second, bucket)
        return found is not None and found.faster and self._check_variants(op, second)

    def _duel(self, op: str, first: Candidate, second: Candidate, bucket: Bucket) -> Duel | None:
        """A paired comparison; None where the second failed in it."""
        pair = [self._contender(first), self._contender(second)]
        try:
            return Duel(**self._remote.duel(op, bucket.sizes, pair, seconds=DUEL_S[self._effort]))
        except Failure as failure:
            if failure.index == 0:
                what = f"{op}, {first.schedule}: right and timed, but then failed on {bucket.name}"
                raise ToolchainError(f"{what}: {failure.message}") from failure
            second.fail(failure.outcome, failure.message)
            return None

    def _check_variants(self, op: str, candidate: Candidate) -> bool:
        """Build and check the variants that were not needed for the race."""
        plans = [
            self.backend.plan(op, self.spec, self.record, candidate.schedule, self.target, variant)
            for variant in VARIANTS[op]
            if variant not in candidate.paths
        ]
        for plan, done in zip(plans, self._build(plans), strict=True):
            if done.path is None:
                candidate.fail(_STATUS[done.status], f"variant {plan.variant}: {done.message}")
                return False
            candidate.paths[plan.variant] = str(done.path)
        if plans:
            self._check(op, candidate, [plan.variant for plan in plans])
        return candidate.alive

    def _contender(self, candidate: Candidate) -> Contender:
        assert candidate.plan is not None
        paths: Mapping[str, str] = candidate.paths
        return Contender(candidate.schedule, candidate.plan.variant, paths)


def _cpu_name() -> str:
    """The CPU's name as Linux gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "CPU"
