"""stopwatch: device time of launches, contenders in turns.

Between two marks on the stream lies device time only if the launches are queued before the device gets to
them. So a sample starts by keeping the device busy for as long as the host needs to queue it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.backends.triton.driver import Driver
from kvgen.gpu_check.clock import Clock

Run = Callable[[int], Any]
"""One call, queued and not waited for; the argument counts calls, so that inputs can rotate."""

SAMPLE_S = 2e-3
"""Device time that a sample should last."""

MOST_CALLS = 200
"""Most calls of one sample: the driver queues about a thousand launches."""

ROUNDS, LEAST_ROUNDS = 15, 3
"""Samples of each contender."""

CYCLES_PER_S = 2e9
"""Of a GPU's clock, roughly: how long a device is kept busy."""


@dataclass(frozen=True)
class Timing:
    """One contender's samples."""

    seconds: float
    """A call: the median."""
    spread: float
    """Half the distance of the quartiles over the median."""
    samples: int


class Stopwatch:
    """Times calls on the default stream of a driver's context."""

    def __init__(self, driver: Driver, occupy: Callable[[int], None]) -> None:
        """``occupy`` queues a kernel that does nothing for so many cycles."""
        self._driver, self._occupy = driver, occupy
        self._start, self._end = driver.event(), driver.event()

    def sample(self, run: Run, turn: int, calls: int, queue_s: float) -> float:
        """Seconds a call; ``queue_s``: what the host needs to queue one."""
        self._occupy(int(1.5 * queue_s * calls * CYCLES_PER_S))
        self._start.record()
        for i in range(calls):
            run(turn + i)
        self._end.record()
        self._end.wait()
        return self._end.seconds_since(self._start) / calls

    def race(self, contenders: Mapping[str, Run], clock: Clock) -> dict[str, Timing]:
        """Times of all contenders, a sample each in turns, until the clock or the rounds run out."""
        calls, queue = {}, {}
        for name, run in contenders.items():
            run(0)  # whatever a first call does
            self._driver.synchronize()
            started = time.perf_counter()
            for turn in range(3):
                run(turn)
            queue[name] = (time.perf_counter() - started) / 3
            self._driver.synchronize()
            once = self.sample(run, 0, 3, queue[name])
            calls[name] = max(1, min(MOST_CALLS, round(SAMPLE_S / max(once, 1e-7))))
        found: dict[str, list[float]] = {name: [] for name in contenders}
        turn = 0
        for done in range(ROUNDS):
            if done >= LEAST_ROUNDS and clock.left < 0:
                break
            order = list(contenders)
            for name in order[done % len(order) :] + order[: done % len(order)]:
                found[name].append(self.sample(contenders[name], turn, calls[name], queue[name]))
                turn += calls[name]
        return {name: _timing(samples) for name, samples in found.items()}


def _timing(samples: list[float]) -> Timing:
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(middle, (high - low) / 2 / middle if middle else 0.0, len(samples))
