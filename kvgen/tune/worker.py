"""The process in which candidates run: a kernel that crashes or hangs takes this process, not the tuner.

``python -m kvgen.tune.worker`` reads a JSON request a line and writes a JSON reply a line; the first line
written is ``{"ready": PROTOCOL}``. Before a contender of a race runs, its index is put into the file ``at``
of the working folder, so that the tuner knows which candidate a crash is due to. (Not into the pipe: the
tuner would wake up for every line, on a core that the kernel needs.)
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvgen.backends.cpu import loader
from kvgen.backends.cpu.backend import CpuBackend, CpuKernel
from kvgen.backends.protocol import Backend
from kvgen.errors import KvgenError, ToolchainError, UnsupportedError
from kvgen.ir import Schedule, Spec
from kvgen.ir.plan import KernelPlan
from kvgen.library import Library
from kvgen.passes.place import place
from kvgen.resolve import backend_for
from kvgen.targets import known_target
from kvgen.tune.bucket import Bucket
from kvgen.tune.carried import Ask, adopt
from kvgen.tune.check import check_op
from kvgen.tune.outcome import Outcome
from kvgen.tune.race import Duel, Run, duel, race
from kvgen.tune.remote import AT, PROTOCOL
from kvgen.tune.workload import POOL_LIMIT, Workload


class Unloadable(ToolchainError):
    """The file of a kernel is gone, damaged or refused: no fault of the kernel that was in it."""


class Prebuilt(CpuBackend):
    """Kernels that the tuner has compiled already, found by variant."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        super().__init__()
        self._paths = dict(paths)

    def compile(self, plans: Sequence[KernelPlan]) -> list[CpuKernel]:
        """Load the shared object of each plan; raises ``Unloadable``."""
        return [CpuKernel(plan, self._load(plan.variant)) for plan in plans]

    def _load(self, variant: str) -> loader.Library:
        try:
            return loader.load(Path(self._paths[variant]))
        except (ToolchainError, OSError) as error:
            raise Unloadable(str(error)) from error


class Session:
    """The spec and target that all requests after ``open`` are about."""

    def __init__(self, request: Mapping[str, Any], ask: Ask) -> None:
        adopt(request["own"], ask)
        self.spec = Spec.from_dict(request["spec"], request["own"]["meanings"])
        self.record = place(self.spec)
        self.target = dataclasses.replace(
            known_target(request["target"]), features=tuple(request["features"])
        )
        self._workloads: dict[Bucket, Workload] = {}

    def check(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A verdict for each variant of one candidate."""
        op = request["op"]
        schedules = {op: Schedule.of(request["schedule"])}
        cpu = self.target.backend == "cpu"
        backend: Backend = Prebuilt(request["paths"]) if cpu else backend_for(self.target)
        library = Library(self.spec, self.record, self.target, backend, schedules)
        return {"verdicts": [dataclasses.asdict(check_op(library, op, v)) for v in request["paths"]]}

    def race(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Median seconds a launch of each contender."""
        runs = self._runs(request)
        return {"times": race(runs, seconds=request["seconds"], announce=_announce)}

    def duel(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A paired comparison of two contenders."""
        first, second = self._runs(request)
        found: Duel = duel(first, second, seconds=request["seconds"], announce=_announce)
        return dataclasses.asdict(found)

    def _runs(self, request: Mapping[str, Any]) -> list[Run]:
        work = self._workload(Bucket(request["op"], tuple(request["sizes"])))
        runs = []
        for index, contender in enumerate(request["contenders"]):
            _announce(index)
            runs.append(self._run(request["op"], contender, work))
        return runs

    def _workload(self, bucket: Bucket) -> Workload:
        """The workload of a bucket; the oldest go where all together would be too large."""
        found = self._workloads.pop(bucket, None)
        if found is None:
            while sum(work.nbytes for work in self._workloads.values()) > POOL_LIMIT // 2:
                del self._workloads[next(iter(self._workloads))]
            found = Workload(self.spec, self.record, bucket)
        self._workloads[bucket] = found
        return found

    def _run(self, op: str, contender: Mapping[str, Any], work: Workload) -> Run:
        import torch

        schedule = Schedule.of(contender["schedule"])
        backend = Prebuilt(contender["paths"])
        variant = contender["variant"]
        kernel = backend.compile([backend.plan(op, self.spec, self.record, schedule, self.target, variant)])[
            0
        ]
        need = max(kernel.workspace(values) for values in work.rotation[:1])
        scratch = torch.empty(max(64, need), dtype=torch.uint8)
        turns = [{**values, "workspace": scratch} for values in work.rotation]
        return lambda turn: kernel.launch(turns[turn % len(turns)])


def _announce(index: int) -> None:
    """Leave word of who runs next."""
    Path(AT).write_text(str(index))


def main() -> int:
    """Serve requests until standard input ends."""
    # Kernels and libraries print where they like; replies have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()

    def say(message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        say(question)
        found: dict[str, Any] = json.loads(sys.stdin.readline())
        return found

    import torch  # noqa: F401 - so that "ready" means that the next request is charged for itself only

    say({"ready": PROTOCOL})
    session: Session | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                session = Session(request, ask)
                say({"ok": True})
            elif session is None:
                raise ToolchainError("asked before it was told of a spec")
            else:
                say(getattr(session, request["do"])(request))
        except (KvgenError, OSError, MemoryError) as error:  # others end this process, with a traceback
            say({"error": type(error).__name__, "message": str(error), "outcome": _blame(error, session)})
    return 0


def _blame(error: Exception, session: Session | None) -> str | None:
    """How the candidate that ran ended by this error; None where it is no candidate's fault."""
    if session is None:
        return None
    if isinstance(error, Unloadable | OSError | MemoryError):
        return Outcome.LOST.value
    return Outcome.WRONG.value if isinstance(error, ToolchainError | UnsupportedError) else None


def _die_with(parent: int) -> None:
    """End soon after the tuner: a kernel that hangs must not outlive it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
