"""Candidates of one op to shared objects, unless the journal knows that they do not compile; twins merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvgen.backends.cpu import artifact, batch
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.backends.cpu.compiler import find_compiler
from kvgen.errors import ToolchainError
from kvgen.ir.plan import KernelPlan
from kvgen.tune import binary, limits
from kvgen.tune.candidate import Candidate
from kvgen.tune.journal import Journal, Line
from kvgen.tune.limits import Limit
from kvgen.tune.outcome import Outcome

STATUS = {
    batch.Status.OK: Outcome.OK,
    batch.Status.COMPILE_ERROR: Outcome.COMPILE_ERROR,
    batch.Status.TIMEOUT: Outcome.TIMEOUT,
}


class Builder:
    """Compiles on ``threads`` cores; what a compile may take follows the quickest so far."""

    def __init__(self, backend: CpuBackend, journal: Journal, threads: int) -> None:
        self._backend, self._journal, self._threads = backend, journal, threads
        self._limit = Limit(*limits.COMPILE)
        self._twins: dict[str, Candidate] = {}

    def build(
        self, wanted: Sequence[tuple[Candidate, KernelPlan]], step: Callable[[], None] = lambda: None
    ) -> None:
        """Compile one plan of each candidate; a build that is known to fail is not tried again.

        One that is known to be good is taken from the cache of builds, and compiled only where it is gone.
        ``step`` is called as each ends, from a compiling thread.
        """
        compiler, limit = find_compiler(), self._limit.seconds
        jobs, owners = [], []
        for candidate, plan in wanted:
            job = dataclasses.replace(self._backend.job(plan), timeout_s=limit)
            key = {"build": job.key(compiler)}
            line = self._journal.known("build", key)
            if line is not None and line["outcome"] != Outcome.OK.value and line["limit_s"] >= limit:
                self._ended(candidate, plan, line)
                step()
                continue
            jobs.append(job)
            owners.append((candidate, plan, key, line))

        def ended(index: int, outcome: batch.Outcome) -> None:
            candidate, plan, key, line = owners[index]
            try:
                found = _line(outcome, limit)
            except (ToolchainError, OSError) as error:  # the cache of builds is being removed
                candidate.fail(Outcome.LOST, f"its build is gone: {error}")
                step()
                return
            if line is None or line["outcome"] != Outcome.OK.value or outcome.path is None:
                line = found
                self._journal.add("build", key, **line, schedule=candidate.schedule.to_dict())
            self._ended(candidate, plan, line, outcome, found["binary"])
            step()

        batch.compile_many(jobs, workers=self._threads, on_outcome=ended)

    def rebuild(self, candidate: Candidate, plan: KernelPlan) -> None:
        """Compile again what was built, where it is gone from the cache of builds.

        One that does not compile any more keeps its path, and is found to be gone when it is loaded.
        """
        (outcome,) = batch.compile_many([self._backend.job(plan)], workers=1)
        if outcome.path is not None:
            candidate.paths[plan.variant] = str(outcome.path)

    def _ended(
        self,
        candidate: Candidate,
        plan: KernelPlan,
        line: Line,
        outcome: batch.Outcome | None = None,
        digest: str = "",
    ) -> None:
        candidate.seconds += line["seconds"]
        if line["outcome"] != Outcome.OK.value:
            where = f"variant {plan.variant}: " if candidate.paths else ""
            candidate.fail(Outcome(line["outcome"]), where + line["message"])
        elif outcome is not None and outcome.path is not None:
            candidate.paths[plan.variant] = str(outcome.path)
            candidate.digests[plan.variant] = digest
            self._limit.took(line["seconds"])

    def merge(self, group: Sequence[Candidate]) -> None:
        """The same machine code runs once: the first of the kind stands for the others."""
        for candidate in group:
            if candidate.alive and candidate.plan is not None:
                first = self._twins.setdefault(candidate.digests[candidate.plan.variant], candidate)
                if first is not candidate:
                    candidate.fail(Outcome.DUPLICATE, f"same machine code as {first.schedule}")


def _line(outcome: batch.Outcome, limit_s: float) -> Line:
    # What the compiler took, also where the build was in the cache.
    seconds = outcome.seconds if outcome.path is None else artifact.read_sidecar(outcome.path).seconds
    return {
        "outcome": STATUS[outcome.status].value,
        "message": outcome.message,
        "seconds": seconds,
        "binary": "" if outcome.path is None else binary.digest(outcome.path),
        "limit_s": limit_s,
    }
