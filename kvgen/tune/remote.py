"""The tuner's end of the process that runs candidates: start, ask, and say which candidate crashed it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import kvgen
from kvgen.backends.triton.process import WorkerDied, WorkerProcess, WorkerTimeout
from kvgen.errors import ToolchainError
from kvgen.ir import Schedule, Spec, Target
from kvgen.tune.carried import answer, carried
from kvgen.tune.outcome import Outcome

PROTOCOL = 4
"""Raised whenever a request or a reply of ``kvgen.tune.worker`` changes shape."""


OPEN_S = 60.0
"""Most seconds of a worker's first request, which runs no kernel."""

AT = "at"
"""File in the worker's folder with the index of the contender that runs."""


@dataclass(frozen=True)
class Contender:
    """A compiled candidate as the worker needs it."""

    schedule: Schedule
    variant: str
    """The variant that is timed."""
    paths: Mapping[str, str]
    """Shared objects by variant (empty text for GPU targets, whose kernels the worker compiles)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"schedule": self.schedule.to_dict(), "variant": self.variant, "paths": dict(self.paths)}


class Failure(Exception):
    """A candidate failed in the worker; ``index`` says which contender of a race, 0 elsewhere."""

    def __init__(self, outcome: Outcome, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.outcome, self.message, self.index = outcome, message, index


class _Process(WorkerProcess):
    """``python -m kvgen.tune.worker`` behind the line protocol of the Triton workers."""

    def __init__(self, folder: Path) -> None:
        self.python = sys.executable
        self._buffer = bytearray()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # The package may be on sys.path only because of where the caller stands.
        roots = [str(Path(kvgen.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, roots))}
        self._process = subprocess.Popen(
            [self.python, "-m", "kvgen.tune.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
            env=env,
            start_new_session=True,
            bufsize=0,
        )

    def accept_ready(self, message: dict[str, Any]) -> None:
        """Check the worker's first message; raises ToolchainError where the two ends do not fit."""
        if message.get("ready") != PROTOCOL:
            self.kill()
            raise ToolchainError(f"the tuning process of {self.python} speaks another protocol: {message}")


class Remote:
    """A worker that is started when it is needed and again after a candidate has killed it."""

    def __init__(self, spec: Spec, target: Target) -> None:
        self._spec = spec
        self._open = {
            "do": "open",
            "spec": spec.to_dict(),
            "own": carried(spec),
            "target": target.name,
            "features": list(target.features),
        }
        self._process: _Process | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvgen-tune-")

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def check(self, op: str, contender: Contender, *, limit_s: float) -> list[dict[str, Any]]:
        """Verdicts (``kvgen.tune.check.Verdict`` as a mapping) of each variant; raises ``Failure``."""
        request = {"do": "check", "op": op, **contender.to_dict()}
        verdicts: list[dict[str, Any]] = self._ask(request, limit_s)["verdicts"]
        return verdicts

    def race(
        self,
        op: str,
        sizes: Sequence[int],
        contenders: Sequence[Contender],
        *,
        seconds: float,
        limit_s: float,
    ) -> list[float]:
        """Median seconds a call of each contender; raises ``Failure`` with the index of who failed."""
        return [
            float(t)
            for t in self._ask(self._request("race", op, sizes, contenders, seconds), limit_s)["times"]
        ]

    def duel(
        self, op: str, sizes: Sequence[int], pair: Sequence[Contender], *, seconds: float, limit_s: float
    ) -> dict[str, Any]:
        """The fields of ``kvgen.tune.race.Duel`` of two contenders; raises ``Failure``."""
        return self._ask(self._request("duel", op, sizes, pair, seconds), limit_s)

    @staticmethod
    def _request(
        do: str, op: str, sizes: Sequence[int], contenders: Sequence[Contender], seconds: float
    ) -> dict[str, Any]:
        rows = [contender.to_dict() for contender in contenders]
        return {"do": do, "op": op, "sizes": list(sizes), "contenders": rows, "seconds": seconds}

    def _ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        process = self._ready()
        at = Path(self._folder.name) / AT
        at.write_text("0")
        try:
            reply = self._reply(process, request, limit)
        except WorkerTimeout:
            self._stop()
            raise Failure(Outcome.TIMEOUT, f"no end after {limit:.1f} s", int(at.read_text() or 0)) from None
        except WorkerDied as death:
            self._stop()
            raise Failure(Outcome.CRASH, f"the process died: {death}", int(at.read_text() or 0)) from None
        except BaseException:
            self._stop()  # it may wait for an answer, or be at work on what nobody wants
            raise
        self._refuse(reply)
        if "error" in reply:
            message = f"{reply['error']}: {reply['message']}"
            raise Failure(Outcome(reply["outcome"]), message, int(at.read_text() or 0))
        return reply

    def _reply(self, process: _Process, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The reply to a request; questions that come first are answered."""
        process.send(request)
        reply = process.receive(limit)
        while "sample" in reply:
            process.send(answer(self._spec, reply))
            reply = process.receive(limit)
        return reply

    def _refuse(self, reply: dict[str, Any]) -> None:
        """Raise an error that is no candidate's fault: one of kvgen, or of what a user registered."""
        if "error" in reply and reply["outcome"] is None:
            self._stop()
            raise ToolchainError(f"the tuning process failed: {reply['error']}: {reply['message']}")

    def _ready(self) -> _Process:
        if self._process is None:
            self._process = process = _Process(Path(self._folder.name))
            try:
                process.wait_ready()
                reply = self._reply(process, self._open, OPEN_S)
            except (WorkerDied, WorkerTimeout) as error:
                self._stop()
                reason = str(error) or f"no reply in {OPEN_S:.0f} s"
                raise ToolchainError(f"the tuning process could not start: {reason}") from None
            except BaseException:
                self._stop()
                raise
            self._refuse(reply)
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
