"""Meter: the time that a limit charges to a process: the clock's, less what it waited for a core.

A busy machine then costs a compiler or a kernel nothing: it is charged what its busiest threads ran. A
process that sleeps is charged the time on the clock, so one that hangs ends, whether it spins or sleeps.
Linux counts both for each thread; elsewhere the clock runs slower by the machine's load for each core.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICK_S = 1.0
"""Most seconds between two looks: what a process waited that has ended since is known up to the last."""

LEAST_S = 0.02
"""Least seconds between two looks."""


class Meter:
    """Seconds charged to a process and its descendants since this was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start = time.monotonic()
        self._base = _threads(pid) or {}
        self._ran: dict[int, int] = {}
        self._waited: dict[int, int] = {}

    def seconds(self) -> float:
        """What is charged by now. Look at least every ``TICK_S`` while processes come and go."""
        wall = time.monotonic() - self._start
        now = _threads(self._pid)
        if now is None:
            return wall / _crowd()
        for process, threads in now.items():
            before = self._base.get(process, {})
            spent = [(ran - before.get(t, (0, 0))[0], waited - before.get(t, (0, 0))[1])
                     for t, (ran, waited) in threads.items()]  # fmt: skip
            self._ran[process] = max([self._ran.get(process, 0), *(ran for ran, _ in spent)])
            self._waited[process] = max([self._waited.get(process, 0), *(waited for _, waited in spent)])
        # Steps of a compiler follow one another. Where processes wait side by side, what they ran counts.
        ran, waited = (sum(found.values()) * 1e-9 for found in (self._ran, self._waited))
        return max(wall - waited, min(wall, ran))

    def pause(self, limit_s: float) -> float:
        """How long to wait before the next look; 0 where the limit has been reached."""
        left = limit_s - self.seconds()
        return max(LEAST_S, min(left, TICK_S)) if left > 0 else 0.0


def _threads(pid: int) -> dict[int, dict[str, tuple[int, int]]] | None:
    """Of a process and its descendants, by thread: nanoseconds it ran, and nanoseconds it waited for a core.

    None where the system does not count them.
    """
    found: dict[int, dict[str, tuple[int, int]]] = {}
    left = [pid]
    while left:
        process = left.pop()
        threads: dict[str, tuple[int, int]] = {}
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                ran, waited = (task / "schedstat").read_text().split()[:2]
                threads[task.name] = int(ran), int(waited)
                left += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):  # one that has just ended, or a system that does not count
            if not _counted():
                return None
        found[process] = threads
    return found


def _counted() -> bool:
    """Whether this system counts at all."""
    own = Path(f"/proc/self/task/{os.getpid()}")
    return (own / "schedstat").exists() and (own / "children").exists()


def _crowd() -> float:
    """Processes that want a core, for each core; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
