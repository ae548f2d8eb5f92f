"""The parent's end of a worker process: start it, send a line, wait for a line, kill it."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from select import POLLIN, poll
from typing import Any, Literal

from kvgen.backends.meter import Meter
from kvgen.backends.triton.worker import PROTOCOL
from kvgen.errors import ToolchainError

STARTUP_TIMEOUT_S = 180.0
"""Importing triton takes 0.3 s on an idle machine and has been seen to take 30 s on a busy one."""

# Variables that replace a tool of the wheel: legitimate, and part of the cache key.
_TOOL_OVERRIDES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH")
# Variables that would change the code without a trace in the key (TRITON_INTERPRET above all).
_SCRUBBED = ("TRITON_", "MLIR_", "LLVM_", "AMDGCN_", "NVPTX_", "PTXAS_",
             "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "USE_IR_LOC")  # fmt: skip


class WorkerDied(Exception):
    """The worker ended by itself; the message says how, with the tail of what it printed."""


class WorkerTimeout(Exception):
    """The worker did not answer in time (it has not been killed yet)."""


NEEDS_IT = "GPU targets and the interpreter need (CPU targets do not); try: pip install 'triton>=3.6'"


def why_absent() -> str | None:
    """Why this process compiles nothing for GPUs; None where it can."""
    try:
        toolchain_id(sys.executable)
    except ToolchainError as error:
        return str(error)
    return None


@functools.cache
def toolchain_id(python: str) -> str:
    """Identity of the Triton that ``python`` imports, e.g. ``triton-3.9.0``, for cache keys.

    Does not import triton. Raises ToolchainError where ``python`` cannot run or has no triton.
    """
    try:
        if python == sys.executable:
            found = version("triton")
        else:
            probe = "from importlib.metadata import version; print(version('triton'))"
            done = subprocess.run(
                [python, "-P", "-c", probe], capture_output=True, text=True, timeout=60, check=True
            )
            found = done.stdout.strip()
    except PackageNotFoundError:
        raise ToolchainError(f"{python} has no triton, which {NEEDS_IT}") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        raise ToolchainError(f"{python} has no usable triton: {' '.join(last)}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"cannot run {python}: {error}") from None
    tools = [f"{name}={os.environ[name]}" for name in _TOOL_OVERRIDES if os.environ.get(name)]
    return " ".join([f"triton-{found}", *tools])


def _environment(extra: dict[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _TOOL_OVERRIDES or not k.startswith(_SCRUBBED)}
    return {**kept, **extra}


class WorkerProcess:
    """A running worker. ``send`` a request, then ``read`` or ``receive`` its reply."""

    def __init__(
        self, mode: Literal["compile", "interpret"], *, python: str, folder: Path, env: dict[str, str]
    ) -> None:
        """Start the process; ``folder`` is its working folder. Does not wait for it to be ready.

        Raises ToolchainError where ``python`` cannot be run.
        """
        self.python = python
        self._buffer = bytearray()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        script = Path(__file__).with_name("worker.py")
        # A session of its own: a Ctrl-C in the terminal reaches the parent only, which then cleans up,
        # and killing the group takes a hanging ptxas along. -P keeps this folder off sys.path.
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(script), mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=folder,
                env=_environment(env),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._log.close()
            raise ToolchainError(f"cannot run {python}: {error}") from None

    def fileno(self) -> int:
        """Descriptor that becomes readable when a reply arrives or the worker ends."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Wait for the first line; raises ToolchainError where the worker cannot start."""
        try:
            self.accept_ready(self.receive(timeout_s))
        except WorkerDied as error:
            self.kill()
            raise ToolchainError(f"the worker of {self.python} could not start: {error}") from None
        except WorkerTimeout:
            self.kill()
            raise ToolchainError(f"the worker of {self.python} was not ready in {timeout_s:.0f} s") from None

    def accept_ready(self, message: dict[str, Any]) -> None:
        """Check the worker's first message; raises ToolchainError where the two ends do not fit."""
        if message.get("ready") != PROTOCOL:
            self.kill()
            raise ToolchainError(f"the worker of {self.python} speaks another protocol: {message}")

    def send(self, message: dict[str, Any]) -> None:
        """Write one request; raises WorkerDied where the process has gone."""
        assert self._process.stdin is not None
        data = memoryview((json.dumps(message) + "\n").encode())
        try:
            while data:
                data = data[self._process.stdin.write(data) or 0 :]
        except BrokenPipeError:
            raise WorkerDied(self._obituary()) from None

    def read(self) -> dict[str, Any] | None:
        """Read what is there and return a whole reply if one is complete; call it when readable."""
        end = self._buffer.find(b"\n")
        if end < 0:
            chunk = os.read(self.fileno(), 1 << 20)
            if not chunk:
                raise WorkerDied(self._obituary())
            self._buffer += chunk
            end = self._buffer.find(b"\n")
            if end < 0:
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message: dict[str, Any] = json.loads(line)
        return message

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a reply; raises WorkerTimeout or WorkerDied. Time is charged as a ``Meter`` does."""
        meter = Meter(self.pid)
        readable = poll()  # not select(), which cannot take a descriptor above 1023
        readable.register(self, POLLIN)
        while pause := meter.pause(timeout_s):
            if readable.poll(pause * 1000) and (message := self.read()) is not None:
                return message
        raise WorkerTimeout

    def _obituary(self) -> str:
        status = self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        tail = self.log_tail()
        return f"{how}; it printed:\n{tail}" if tail else how

    def log_tail(self, limit: int = 4000) -> str:
        """The last ``limit`` bytes that the worker printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), limit, max(0, size - limit)).decode(errors="replace").strip()

    def kill(self) -> None:
        """End the worker and everything it started, and reap it. Safe to call again."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()
