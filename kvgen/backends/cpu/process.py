"""Run a compiler so that neither it nor its children outlive their timeout."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgen.backends.meter import Meter
from kvgen.errors import ToolchainError


@dataclass(frozen=True)
class Completed:
    """A compiler run that ended."""

    returncode: int
    output: str
    """Standard output and standard error, interleaved."""
    seconds: float
    """What it was charged: see ``kvgen.backends.meter``."""


class CompilerTimeout(ToolchainError):
    """The compiler took longer than it was given, and was killed with its children."""


def invoke(command: Sequence[str], *, cwd: Path, timeout_s: float) -> Completed:
    """Run a compiler in ``cwd`` with English messages and its temporary files under ``cwd``.

    Raises:
        CompilerTimeout: it took longer than ``timeout_s`` seconds, what it waited for a core left out.
        ToolchainError: it could not be started.
    """
    # C locale: messages are parsed. TMPDIR: a killed compiler's leftovers go when the build folder goes.
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(cwd)}
    try:
        process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ToolchainError(f"cannot start {command[0]}: {error.strerror}") from error
    meter = Meter(process.pid)
    with process:
        try:
            output = _output(process, meter, timeout_s)
        except BaseException:
            # The driver's children (cc1plus, as, ld) hold the pipe; killing only g++ would leave them
            # running.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    return Completed(process.returncode, output, meter.seconds())


def _output(process: subprocess.Popen[str], meter: Meter, timeout_s: float) -> str:
    """All that the process printed, once it has ended; raises ``CompilerTimeout`` where it does not."""
    while pause := meter.pause(timeout_s):
        try:
            return process.communicate(timeout=pause)[0]
        except subprocess.TimeoutExpired:
            continue
    raise CompilerTimeout(f"{Path(str(process.args[0])).name} was killed after {timeout_s:g} s")  # type: ignore[index]
