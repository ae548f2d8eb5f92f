"""race: contenders take turns in one process; what counts is the median of undisturbed samples.

Interleaving makes drift of the machine (frequency, neighbours) hit all contenders alike, which separate
runs do not. A sample during which one of our threads was runnable but waited for a core measures the
neighbour, not the kernel: Linux counts that wait, and such samples are left out while enough others remain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Run = Callable[[int], None]
"""One launch; the argument counts launches, so that inputs can rotate."""

SAMPLE_S = 3e-4
"""A sample lasts at least this long; short kernels are launched several times for one."""

MOST_WAIT = 0.05
"""Share of a sample that threads may have waited for a core."""

LEAST_ROUNDS = 3
"""Samples of every contender, however long they take."""

WARM_UP = 2
"""Launches of every contender before its first sample."""


@dataclass
class Lane:
    """One contender's samples."""

    run: Run
    index: int
    reps: int = 1
    clean: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    def median(self) -> float:
        """Seconds a launch: the median of the undisturbed samples; where those are few, a low quantile."""
        return statistics.median(self.clean) if len(self.clean) >= 3 else _low(self.clean + self.disturbed)


def _low(samples: Sequence[float]) -> float:
    """The lower eighth: on a busy machine most samples hold other programs' time as well."""
    return sorted(samples)[len(samples) // 8]


def waited_ns() -> int:
    """Nanoseconds that this process's threads have spent runnable but not running; 0 where not counted."""
    total = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            total += int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # a thread that just ended, or a kernel without the counter
        return total
    return total


def sample(lane: Lane, turn: int) -> float:
    """Time one sample of a lane; returns seconds a launch."""
    before = waited_ns()
    start = time.perf_counter_ns()
    for i in range(lane.reps):
        lane.run(turn + i)
    elapsed = time.perf_counter_ns() - start
    waited = waited_ns() - before
    seconds = elapsed * 1e-9 / lane.reps
    (lane.disturbed if waited > MOST_WAIT * elapsed else lane.clean).append(seconds)
    return seconds


def race(
    runs: Sequence[Run],
    *,
    seconds: float,
    announce: Callable[[int], None] = lambda index: None,
    most_rounds: int = 200,
) -> list[float]:
    """Median seconds a launch of each contender.

    ``announce`` is told who runs next (so that a crash can be laid to it); ``seconds``: when to stop, after
    ``LEAST_ROUNDS`` in any case.
    """
    lanes = [Lane(run, index) for index, run in enumerate(runs)]
    turn = 0
    for lane in lanes:  # warm up, and find how many launches make a sample
        announce(lane.index)
        for _ in range(WARM_UP):
            start = time.perf_counter()
            lane.run(turn)
            turn += 1
            lane.reps = max(1, min(50, round(SAMPLE_S / max(1e-7, time.perf_counter() - start))))
    deadline = time.perf_counter() + seconds
    for done in range(most_rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        shift = done % len(lanes)
        for lane in lanes[shift:] + lanes[:shift]:
            announce(lane.index)
            sample(lane, turn)
            turn += lane.reps
    return [lane.median() for lane in lanes]


@dataclass(frozen=True)
class Duel:
    """A paired comparison of two contenders."""

    ratio: float
    """Median of (second / first) over the pairs: below 1, the second is faster."""
    wins: float
    """Share of the pairs that the second won."""
    first_s: float
    second_s: float
    """Median seconds a launch."""
    calm: bool
    """Whether enough pairs ran undisturbed."""

    @property
    def faster(self) -> bool:
        """Whether the second is faster by more than noise; a tie is not. A busy machine is a noisy one."""
        return self.ratio < (0.98 if self.calm else 0.85) and self.wins >= (2 / 3 if self.calm else 0.8)

    @property
    def slower(self) -> bool:
        """Whether the second is slower by more than noise. In doubt it is: the first is the default."""
        return self.ratio > 1.03 or (self.ratio > 1.01 and self.wins <= 1 / 3)


def duel(
    first: Run,
    second: Run,
    *,
    seconds: float,
    announce: Callable[[int], None] = lambda index: None,
    least: int = 6,
    most: int = 60,
) -> Duel:
    """Pairs of samples in alternating order; a disturbed pair counts only where few others are left."""
    lanes = [Lane(first, 0), Lane(second, 1)]
    turn = 0
    for lane in lanes:
        announce(lane.index)
        start = time.perf_counter()
        lane.run(turn)
        turn += 1
        lane.reps = max(1, min(50, round(SAMPLE_S / max(1e-7, time.perf_counter() - start))))
    # Equal work in a sample: what surrounds a launch must weigh the same on both sides.
    reps = max(lane.reps for lane in lanes)
    for lane in lanes:
        lane.reps = reps
    clean: list[tuple[float, float]] = []
    rest: list[tuple[float, float]] = []
    deadline = time.perf_counter() + seconds
    for done in range(most):
        late = time.perf_counter() - deadline
        if done >= least and (late > seconds or (late > 0 and len(clean) >= least)):
            break
        pair = [0.0, 0.0]
        disturbed = [len(lane.disturbed) for lane in lanes]
        for lane in lanes if done % 2 == 0 else lanes[::-1]:
            announce(lane.index)
            pair[lane.index] = sample(lane, turn)
            turn += reps
        calm = disturbed == [len(lane.disturbed) for lane in lanes]
        (clean if calm else rest).append((pair[0], pair[1]))
    enough = len(clean) >= least
    pairs = clean if enough else clean + rest
    ratios = [b / a for a, b in pairs]
    typical = statistics.median if enough else _low
    first_s, second_s = (typical([pair[side] for pair in pairs]) for side in (0, 1))
    ratio = statistics.median(ratios) if enough else second_s / first_s
    return Duel(ratio, sum(r < 1 for r in ratios) / len(ratios), first_s, second_s, enough)
