"""Build many kernels at once, for the autotuner: one outcome per job, failures included."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvgen.backends.cpu.compiler import Compiler, find_compiler
from kvgen.backends.cpu.job import Job
from kvgen.backends.cpu.process import CompilerTimeout
from kvgen.backends.cpu.toolchain import CompileError, build
from kvgen.errors import ArgumentError


class Status(enum.Enum):
    """How one build of ``compile_many`` ended."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Outcome:
    """One build of ``compile_many``."""

    status: Status
    path: Path | None
    """The library; None unless ``status`` is OK."""
    message: str
    """The error; empty when OK."""
    seconds: float
    """Wall time, cache lookup included."""


def compile_many(
    jobs: Sequence[Job],
    *,
    cache_dir: Path | None = None,
    workers: int = 2,
    compiler: Compiler | None = None,
    on_outcome: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Build many jobs, a few at a time; a job's failure is its outcome, not an exception.

    Args:
        workers: compilers at work at once.
        on_outcome: called with (index, outcome) as each build ends, from a worker thread; for progress and
        logs.

    Returns:
        One outcome per job, in the order of ``jobs``.

    Raises:
        ToolchainError: no working compiler (before anything is built).
        Exception: whatever is not the fault of one source; the builds not yet started are dropped then.
    """
    if workers < 1:
        raise ArgumentError(f"workers = {workers!r}: at least 1")
    chosen = compiler or find_compiler()

    def run(index: int) -> Outcome:
        start = time.monotonic()
        try:
            path: Path | None = build(jobs[index], cache_dir=cache_dir, compiler=chosen)
            status, message = Status.OK, ""
        except CompileError as error:
            path, status, message = None, Status.COMPILE_ERROR, str(error)
        except CompilerTimeout as error:
            path, status, message = None, Status.TIMEOUT, str(error)
        outcome = Outcome(status, path, message, time.monotonic() - start)
        if on_outcome is not None:
            on_outcome(index, outcome)
        return outcome

    with ThreadPoolExecutor(workers, thread_name_prefix="kvgen-cxx") as pool:
        futures = [pool.submit(run, index) for index in range(len(jobs))]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
