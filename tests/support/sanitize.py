"""Run Python that calls a sanitised kernel, with the sanitizer's runtime loaded first, and fail on any
report.

The runtimes must come before everything else in a process, so a snippet runs in a Python of its own
(``LD_PRELOAD``). torch imports under them (2 s more); numpy alone takes 0.3 s. Both of their buffers come
from malloc and have red zones. What is not seen: masked AVX-512 loads (GCC does not instrument them) and
mmap'ed pools; those are ``guard.py``'s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvgen.backends.cpu.compiler import Compiler, find_compiler, sanitizer_libraries

REPORTS = (
    "ERROR: AddressSanitizer",
    "runtime error:",
    "ERROR: UndefinedBehaviorSanitizer",
    "AddressSanitizer:DEADLYSIGNAL",
)
_ASAN = {
    "detect_leaks": "0",  # the interpreter never frees all it has
    "abort_on_error": "0",
    "exitcode": "99",
    "handle_segv": "1",
    "malloc_context_size": "6",  # frames kept per allocation; the default of 30 costs seconds at import torch
    "detect_odr_violation": "0",  # each kernel library holds helpers of the same names
    "allocator_may_return_null": "1",  # a failed allocation is Python's MemoryError, as without the sanitizer
}
_UBSAN = {"halt_on_error": "1", "print_stacktrace": "1", "exitcode": "98"}


@dataclass(frozen=True)
class SanitizedRun:
    """How the snippet's process ended."""

    returncode: int
    """Negative: minus the number of the signal."""
    stdout: str
    stderr: str

    @property
    def report(self) -> str:
        """The sanitizer's report, from its first line on; empty when there is none."""
        found = [index for mark in REPORTS if (index := self.stderr.find(mark)) >= 0]
        return self.stderr[self.stderr.rfind("\n", 0, min(found)) + 1 :] if found else ""

    def check(self) -> str:
        """The snippet's standard output; an AssertionError with the report, or with how it ended
        otherwise.
        """
        if self.report:
            raise AssertionError(f"sanitizer report:\n{self.report[:6000]}")
        if self.returncode:
            how = (
                signal.Signals(-self.returncode).name if self.returncode < 0 else f"status {self.returncode}"
            )
            raise AssertionError(f"the snippet ended with {how}:\n{self.stderr[-4000:]}")
        return self.stdout


def run_sanitized(
    snippet: str, *args: str | Path, timeout_s: float = 120.0, compiler: Compiler | None = None
) -> SanitizedRun:
    """Run a Python snippet under the address and undefined-behaviour sanitizers.

    Args:
        snippet: Python source; builds of ``compile_shared(..., sanitize=True)`` can be loaded in it.
        args: its ``sys.argv[1:]``.
        timeout_s: seconds after which it is killed (``subprocess.TimeoutExpired``).
        compiler: whose runtimes to load; must be the one that built the kernels. Default:
        ``find_compiler()``.

    Raises:
        ToolchainError: the runtimes are not installed.
    """
    libraries = sanitizer_libraries(compiler or find_compiler())
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in _ASAN.items()),
        "UBSAN_OPTIONS": ":".join(f"{name}={value}" for name, value in _UBSAN.items()),
        "PYTHONMALLOC": "malloc",  # small objects get red zones of their own instead of sharing an arena
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", "")))),
    }
    done = subprocess.run(
        [sys.executable, "-c", snippet, *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    return SanitizedRun(done.returncode, done.stdout, done.stderr)
