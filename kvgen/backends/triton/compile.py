"""Compile kernels for a GPU that need not be here: a pool of worker processes and its outcomes.

A candidate that does not compile, hangs or takes the compiler down is an outcome, not an exception:
the tuner records it and goes on.
"""

from __future__ import annotations

import enum
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from select import POLLIN, poll

from kvgen import paths
from kvgen.backends.meter import Meter
from kvgen.backends.triton import store
from kvgen.backends.triton.arch import GpuArch, gpu_arch
from kvgen.backends.triton.files import write_module
from kvgen.backends.triton.process import STARTUP_TIMEOUT_S, WorkerDied, WorkerProcess, toolchain_id
from kvgen.backends.triton.source import TritonSource
from kvgen.backends.triton.store import CompiledKernel
from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError

_JOBS_PER_WORKER = 200
"""A worker is replaced after so many kernels: it keeps every module it has imported."""
_STALE_S = 24 * 3600.0


class Outcome(enum.StrEnum):
    """How a compile ended."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    """The compiler refused the source."""
    TIMEOUT = "timeout"
    CRASH = "crash"
    """The compiler process ended by itself."""
    RESOURCE = "resource"
    """It compiled, or nearly, and needs more shared memory or registers than the target has."""


@dataclass(frozen=True)
class CompileResult:
    """The outcome of one source."""

    source: TritonSource
    target: str
    outcome: Outcome
    message: str
    """The compiler's own message; empty for ``ok``."""
    seconds: float
    """Wall time of this compile; 0 for a cached one."""
    cached: bool
    kernel: CompiledKernel | None
    """Set if and only if the outcome is ``ok``."""


Progress = Callable[[int, int, CompileResult], None]
"""Called as progress(done, total, result), in the caller's thread, once for each source."""


def compile_one(
    source: TritonSource,
    target: str,
    *,
    cache_dir: Path,
    timeout_s: float = 300.0,
    python: str = sys.executable,
) -> CompiledKernel:
    """Compile one source; raises ToolchainError with the compiler's own message when it fails."""
    (result,) = compile_many(
        [source], target, cache_dir=cache_dir, workers=1, timeout_s=timeout_s, python=python
    )
    if result.kernel is None:
        raise ToolchainError(f"{source.kernel} for {target}: {result.outcome.value}: {result.message}")
    return result.kernel


def compile_many(
    sources: Sequence[TritonSource],
    target: str,
    *,
    cache_dir: Path,
    workers: int = 2,
    timeout_s: float = 300.0,
    python: str = sys.executable,
    progress: Progress | None = None,
) -> list[CompileResult]:
    """Compile ``sources`` for ``target`` and return their outcomes in the same order.

    ``cache_dir`` holds the results and all of Triton's own files; ``timeout_s`` is the most one source
    may take (starting a worker is not charged to it); ``python`` is the interpreter whose Triton
    compiles. Sources with the same key are compiled once.

    Raises UnsupportedError for an unknown target, ArgumentError for a source the target cannot take
    and ToolchainError where no worker can be started.
    """
    arch = gpu_arch(target)
    if workers < 1:
        raise ArgumentError(f"workers = {workers}: must be at least 1")
    for source in sources:
        if source.maxnreg is not None and arch.backend != "cuda":
            raise UnsupportedError(f"maxnreg = {source.maxnreg}: {target} has no such limit; leave it None")
    toolchain = toolchain_id(python)
    run = _Run(sources, arch, toolchain, cache_dir, progress)
    if run.waiting:
        paths.make(cache_dir)
        _remove_stale(cache_dir)
        with tempfile.TemporaryDirectory(
            prefix="compiling-", dir=cache_dir, ignore_cleanup_errors=True
        ) as scratch:
            _work(run, min(workers, len(run.waiting)), timeout_s, python, Path(scratch))
    return [run.results[key] for key in run.keys]


def _remove_stale(cache_dir: Path) -> None:
    """Remove scratch folders of callers that were killed (a day old: no compile lasts that long)."""
    for folder in cache_dir.glob("compiling-*"):
        try:
            if time.time() - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder)
        except FileNotFoundError:
            continue  # another process removed it first


class _Run:
    """The book-keeping of one batch: which keys wait, what each came to."""

    def __init__(
        self,
        sources: Sequence[TritonSource],
        arch: GpuArch,
        toolchain: str,
        cache_dir: Path,
        progress: Progress | None,
    ) -> None:
        self.arch, self.toolchain, self.cache_dir, self._progress = arch, toolchain, cache_dir, progress
        self.keys = [source.key(arch.name, toolchain) for source in sources]
        self.sources = dict(zip(self.keys, sources, strict=True))
        self.results: dict[str, CompileResult] = {}
        self.waiting: deque[str] = deque()
        self._done = 0
        for key in self.sources:
            kernel = store.load(cache_dir, key, arch)
            if kernel is None:
                self.waiting.append(key)
            else:
                self._finish(key, kernel, 0.0, cached=True)

    def failed(self, key: str, outcome: Outcome, message: str, seconds: float) -> None:
        """Record a failure."""
        self._record(
            key, CompileResult(self.sources[key], self.arch.name, outcome, message, seconds, False, None)
        )

    def replied(self, key: str, reply: dict[str, object], seconds: float) -> None:
        """Record a worker's reply."""
        if "error" in reply:
            self.failed(key, Outcome(str(reply["error"])), str(reply["message"]), seconds)
            return
        kernel = store.save(
            self.cache_dir, key, self.arch, toolchain=self.toolchain,
            signature=self.sources[key].launch_arguments, reply=reply, seconds=seconds)  # fmt: skip
        self._finish(key, kernel, seconds, cached=False)

    def _finish(self, key: str, kernel: CompiledKernel, seconds: float, *, cached: bool) -> None:
        # Triton checks this at load time only, on a machine that has the GPU.
        if kernel.metadata.shared > self.arch.max_shared_bytes:
            message = (f"shared memory: {kernel.metadata.shared} bytes a block, {self.arch.name} has "
                       f"{self.arch.max_shared_bytes}; use a smaller tile or fewer stages")  # fmt: skip
            self.failed(key, Outcome.RESOURCE, message, seconds)
            return
        result = CompileResult(self.sources[key], self.arch.name, Outcome.OK, "", seconds, cached, kernel)
        self._record(key, result)

    def _record(self, key: str, result: CompileResult) -> None:
        self.results[key] = result
        for _ in range(self.keys.count(key)):
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, len(self.keys), result)


class _Slot:
    """One place in the pool: a worker and the job it has."""

    def __init__(self, python: str, folder: Path) -> None:
        env = {"TRITON_HOME": str(folder), "TRITON_CACHE_DIR": str(folder / "triton"), "TMPDIR": str(folder),
               # Line tables hold the path of the source, so equal kernels would get unequal binaries.
               "TRITON_DISABLE_LINE_INFO": "1"}  # fmt: skip
        self.worker = WorkerProcess("compile", python=python, folder=folder, env=env)
        self.ready = False
        self.job: str | None = None
        self.jobs = 0
        self.begin()

    def begin(self) -> None:
        """Charge this worker from now on."""
        self.started, self._meter = time.monotonic(), Meter(self.worker.pid)

    def pause(self, timeout_s: float) -> float | None:
        """How long to wait for this worker, 0 where it is late; None where nothing is awaited."""
        if self.ready and self.job is None:
            return None
        return self._meter.pause(timeout_s if self.ready else STARTUP_TIMEOUT_S)


def _work(run: _Run, workers: int, timeout_s: float, python: str, scratch: Path) -> None:
    """Drain ``run.waiting`` with ``workers`` workers: one loop over their pipes, no threads."""
    slots = [_Slot(python, scratch) for _ in range(workers)]
    try:
        while run.waiting or any(slot.job is not None for slot in slots):
            for index, slot in enumerate(slots):
                if slot.ready and slot.job is None and run.waiting:
                    slots[index] = _assign(run, slot, python, scratch)
            readable = _readable(slots, timeout_s)
            for index, slot in enumerate(slots):
                if slot.worker.fileno() in readable:
                    alive = _advance(run, slot)
                elif slot.pause(timeout_s) == 0.0:
                    alive = _expire(run, slot, timeout_s)
                else:
                    continue
                if not alive:
                    slot.worker.kill()
                    slots[index] = _Slot(python, scratch)
    finally:
        for slot in slots:
            slot.worker.kill()


def _assign(run: _Run, slot: _Slot, python: str, scratch: Path) -> _Slot:
    """Give the next job to ``slot``, or to a fresh worker in its place."""
    if slot.jobs >= _JOBS_PER_WORKER or not slot.worker.alive:
        slot.worker.kill()
        return _Slot(python, scratch)
    key = run.waiting.popleft()
    source = run.sources[key]
    path = write_module(source.text, run.cache_dir / "modules")
    slot.job, slot.jobs = key, slot.jobs + 1
    slot.begin()
    try:
        slot.worker.send(source.request(run.arch, path))
    except WorkerDied:
        # It ended between the check and the write, so this job is not to blame: give it to the next.
        run.waiting.appendleft(key)
        slot.worker.kill()
        return _Slot(python, scratch)
    return slot


def _readable(slots: list[_Slot], timeout_s: float) -> set[int]:
    """Descriptors of the workers that have something to say, waiting no longer than until one may be late."""
    poller = poll()
    for slot in slots:
        poller.register(slot.worker, POLLIN)
    wait_s = min((pause for slot in slots if (pause := slot.pause(timeout_s)) is not None), default=0.1)
    return {descriptor for descriptor, _ in poller.poll(wait_s * 1000 + 1)}


def _advance(run: _Run, slot: _Slot) -> bool:
    """Take what a readable worker says; returns whether it can go on."""
    seconds = time.monotonic() - slot.started
    try:
        message = slot.worker.read()
    except WorkerDied as death:
        if not slot.ready:
            raise ToolchainError(f"the worker of {slot.worker.python} could not start: {death}") from None
        if slot.job is not None:
            run.failed(slot.job, Outcome.CRASH, f"the compiler process ended: {death}", seconds)
        return False
    if message is None:
        return True
    if not slot.ready:
        slot.worker.accept_ready(message)
        slot.ready = True
    elif slot.job is not None:
        run.replied(slot.job, message, seconds)
        slot.job = None
    return True


def _expire(run: _Run, slot: _Slot, timeout_s: float) -> bool:
    """Give a worker up that has had its time; always False: it must be replaced."""
    if not slot.ready or slot.job is None:
        raise ToolchainError(f"the worker of {slot.worker.python} was not ready in {STARTUP_TIMEOUT_S:.0f} s")
    run.failed(slot.job, Outcome.TIMEOUT, f"no result after {timeout_s:g} s", time.monotonic() - slot.started)
    return False
