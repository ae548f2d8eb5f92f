"""GpuJudge: candidates for a GPU are judged by their binaries; nothing is timed, and it is said so.

Where the GPU is here, the winner is at least run once on the hard cases before it may win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvgen import paths
from kvgen.backends.cpu import machine
from kvgen.backends.protocol import Backend
from kvgen.backends.triton.compile import CompileResult
from kvgen.backends.triton.kernel import TritonKernel, sources
from kvgen.backends.triton.launch_device import why_not
from kvgen.backends.triton.roomy import compile_roomy
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.passes.abi import VARIANTS
from kvgen.passes.inspect import faults
from kvgen.passes.render import render
from kvgen.tune import limits, model
from kvgen.tune.bucket import Bucket
from kvgen.tune.candidate import Candidate, log_mean
from kvgen.tune.journal import Journal
from kvgen.tune.model import kv_bytes
from kvgen.tune.outcome import Outcome, Progress, Step
from kvgen.tune.remote import Contender, Failure, Remote

MARGIN = 0.98
"""A prediction must be below this share of the default's to replace it: the model is no better than that."""


class GpuJudge:
    """Judges candidates by compiled resources."""

    how = "predicted"
    late = False

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
        self.spec, self.record, self.target, self.backend = spec, record, target, backend
        self._say = progress
        self._remote = Remote(spec, target)
        self._facts: dict[Schedule, Mapping[str, Mapping[str, Any]]] = {}
        self._seen: dict[str, Candidate] = {}

    def close(self) -> None:
        """End the process that runs candidates, where one was started."""
        self._remote.__exit__(None, None, None)

    def start(self, op: str, journal: Journal) -> None:
        """Begin with an op. Its binaries are kept by Triton's own cache: the journal has nothing to spare."""
        self._op = op
        self._facts, self._seen = {}, {}

    def rank(self, op: str, schedule: Schedule, workloads: Sequence[Bucket]) -> float:
        """Bytes in flight against registers: what can be said before compiling. Smaller is better."""
        if "num_stages" not in schedule:
            return 0.0
        tile, warps = schedule.int("tile"), schedule.int("num_warps")
        # About 4 KB of K and V a warp and stage is what keeps memory busy without spilling.
        per_warp = tile * kv_bytes(self.spec, self.record) / self.spec.attention.kv_heads / warps
        return abs(per_warp / 4096 - 1) + 0.5 * abs(schedule.int("num_stages") - 3)

    def prove(self, candidates: Sequence[Candidate]) -> None:
        """Compile all kernels of every live candidate; read what they use; merge equal binaries."""
        live = [(c, c.plan, render(c.plan)) for c in candidates if c.alive and c.plan is not None]
        parts = [sources(plan, text) for _, plan, text in live]
        flat = [part for group in parts for part in group]

        def tell(done: int, total: int, result: CompileResult) -> None:
            self._say(Step(self._op, "prove", done, total))

        found = iter(
            compile_roomy(
                flat,
                self.target.name,
                cache_dir=paths.subfolder("triton"),
                workers=machine.num_threads(),
                progress=tell,
            )
        )
        for (candidate, plan, text), group in zip(live, parts, strict=True):
            results = [next(found) for _ in group]
            candidate.seconds = sum(result.seconds for result in results)
            failed = next((r for r in results if r.kernel is None), None)
            if failed is not None:
                candidate.fail(Outcome(failed.outcome.value), failed.message)
                continue
            settled = tuple(result.source for result in results)
            binaries = tuple(r.kernel for r in results if r.kernel is not None)
            self._inspect(candidate, plan.op, TritonKernel(plan, text, settled, binaries).resources())

    def _inspect(
        self,
        candidate: Candidate,
        op: str,
        facts: Mapping[str, Mapping[str, Any]],
    ) -> None:
        if found := faults(op, facts, self.spec):
            candidate.fail(Outcome.RESOURCE, "; ".join(found))
            return
        same = "|".join(str(kernel["fingerprint"]) for kernel in facts.values())
        first = self._seen.setdefault(same, candidate)
        if first is not candidate:
            candidate.fail(Outcome.DUPLICATE, f"same binary as {first.schedule}")
        self._facts[candidate.schedule] = facts

    def time(self, pool: Sequence[Candidate], base: Candidate, workloads: Sequence[Bucket]) -> Candidate:
        """The model's figure stands for a time; it is the same for all workloads. Returns the base."""
        for candidate in pool:
            if candidate.alive:
                facts = self._facts[candidate.schedule]
                cost = model.gpu_cost(
                    self._op, self.spec, self.record, candidate.schedule, self.target, facts
                )
                candidate.times = {bucket.name: cost for bucket in workloads}
        return base

    def winner(
        self,
        pool: Sequence[Candidate],
        base: Candidate,
        workloads: Sequence[Bucket],
        order: Callable[[Schedule], tuple[int, ...]],
    ) -> Candidate:
        """The best prediction, if it is clearly below the base's (and right, where the GPU is here)."""
        limit = base.times[workloads[0].name] * MARGIN
        rivals = sorted(
            (c for c in pool if c.alive and c is not base and c.times[workloads[0].name] < limit),
            key=lambda c: (log_mean(c, base, workloads), -self._occupancy(c), order(c.schedule)),
        )
        here = not why_not(self.target.name)
        for rival in rivals:
            if here:
                self._run(rival)
            if rival.alive:
                return rival
        return base

    def better(self, first: Candidate, second: Candidate, bucket: Bucket) -> bool:
        """Never: a prediction is the same for all workloads."""
        return False

    def _occupancy(self, candidate: Candidate) -> float:
        return model.occupancy(next(iter(self._facts[candidate.schedule].values())), self.target)

    def _run(self, candidate: Candidate) -> None:
        assert candidate.plan is not None
        contender = Contender(
            candidate.schedule, candidate.plan.variant, dict.fromkeys(VARIANTS[self._op], "")
        )
        try:
            verdicts = self._remote.check(self._op, contender, limit_s=limits.CHECK[2])
        except Failure as failure:
            candidate.fail(failure.outcome, failure.message)
            return
        for verdict in verdicts:
            if not verdict["ok"]:
                candidate.fail(Outcome.WRONG, f"{verdict['case']}: {verdict['message']}")
