"""turns: contenders take turns, round by round in a shuffled order, and disturbed samples are dropped.

Interleaving lets drift of the machine (frequency, neighbours, the memory's mode) hit all alike. A sample
counts when its threads waited for a core less than ``MOST_WAIT`` of its time; another is taken at once, up to
``TRIES`` in a round. Dropped ones are counted, never used.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvgen.bench.waits import waited_ns

MOST_WAIT = 0.01
"""Share of a sample that threads may have waited on a run queue."""

SAMPLE_S = 1e-3
"""A sample lasts at least this long: short calls are made several times for one."""

LEAST = 3
"""Fewest rounds, however long they take, and fewest samples of a figure to be trusted."""

TRIES = 3
"""Samples of a lane in one round, until one is undisturbed."""

WARM_UP = 3
"""Calls of every contender before its first sample; on a busy machine one of them may be undisturbed."""

SLOW_S = 0.2
"""A call that takes longer is checked once, needs no other one to warm up, and has one try a round."""

MOST_REPS = 400
"""Calls in one sample."""

SHORT_S = 0.02
"""A call that takes longer is not changed by threads that have to be woken (some 50 us)."""

REST_S = 1e-2
"""Before a sample with several threads: those of another OpenMP runtime spin for milliseconds after their
work, on the cores of the contender that comes next."""

Clock = Callable[[], float]
"""Seconds, from any start."""

Waited = Callable[[], int | None]
"""Nanoseconds that the process's threads have waited; None where that is not counted."""


@dataclass
class Lane:
    """What is measured again and again: a contender, or a read limit."""

    name: str
    measure: Callable[[], float]
    """Take one sample and return its value: seconds a call, or bytes a second."""
    cost_s: float = 0.0
    """What one sample takes, from the warm-up."""
    samples: dict[int, float] = field(default_factory=dict)
    """Value of each round that has an undisturbed sample."""
    dropped: int = 0
    """Samples that did not count."""
    share: float = 1.0
    """Rounds in which it runs, of all."""

    def due(self, turn: int) -> bool:
        """Whether it runs in a round: in the first, then evenly spread."""
        return turn == 0 or math.floor(turn * self.share) > math.floor((turn - 1) * self.share)


class Calls:
    """Times calls of a contender; the argument of a call counts them, so that its memory can rotate."""

    def __init__(
        self, call: Callable[[int], None], clock: Clock = time.perf_counter, *, wake: bool = False
    ) -> None:
        """``wake``: make a call that does not count before each sample of short ones, since threads that
        rested have to be woken."""
        self._call, self._clock, self._wake = call, clock, wake
        self._turn = 0
        self.reps = 1
        self.seconds = 0.0

    def warm_up(self) -> float:
        """A few calls; sets how many make a sample, and returns the seconds of the quickest."""
        seconds = math.inf
        for _ in range(WARM_UP):
            start = self._clock()
            self._call(self._turn)
            seconds = min(seconds, self._clock() - start)
            self._turn += 1
        self.reps = max(1, min(MOST_REPS, math.ceil(SAMPLE_S / max(seconds, 1e-7))))
        self.seconds = seconds
        return seconds

    def __call__(self) -> float:
        """Seconds a call, over one sample."""
        call = self._call
        if self._wake and self.seconds < SHORT_S:
            call(self._turn)
            self._turn += 1
        turn = self._turn
        start = self._clock()
        for i in range(turn, turn + self.reps):
            call(i)
        elapsed = self._clock() - start
        self._turn += self.reps
        return elapsed / self.reps


def plan(lanes: Iterable[Lane], rounds: int, seconds: float) -> None:
    """Set each lane's share of the rounds so that all fit in ``seconds``: cheap ones run in every round.

    A lane that is a hundred times slower than another would else eat the time of all. It gets ``LEAST``
    samples, or one where those would take longer than everything should.
    """
    left = sorted(lanes, key=lambda lane: lane.cost_s)
    budget = seconds
    for place, lane in enumerate(left):
        fair = budget / (len(left) - place)
        least = LEAST if LEAST * lane.cost_s <= seconds else 1
        turns = min(float(rounds), max(float(least), fair / max(lane.cost_s, 1e-9)))
        lane.share = turns / rounds
        budget = max(0.0, budget - turns * lane.cost_s)


def take_turns(
    lanes: Sequence[Lane],
    *,
    rounds: int,
    seconds: float,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    waited: Waited = waited_ns,
    rest: Callable[[], None] = lambda: None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Sample all lanes for so many rounds; returns how many rounds there were. ``rest`` precedes each sample.

    Ends early where waits make it last half as long again as ``seconds``, but not before ``LEAST`` rounds;
    goes on up to twice the rounds while a quick lane has few samples and there is time.
    """
    plan(lanes, rounds, seconds)
    shuffle, start = random.Random(seed), clock()
    turn = 0
    while turn < 2 * rounds:
        late = clock() - start
        poor = any(len(lane.samples) < LEAST for lane in lanes if lane.share == 1.0)
        if turn >= LEAST and (late > 1.5 * seconds or (turn >= rounds and not (poor and late < seconds))):
            break
        due = [lane for lane in lanes if lane.due(turn)]
        shuffle.shuffle(due)
        for lane in due:
            _sample(lane, turn, clock, waited, rest)
        turn += 1
        advance(min(turn, rounds), rounds)
    return turn


def _sample(lane: Lane, turn: int, clock: Clock, waited: Waited, rest: Callable[[], None]) -> None:
    """One undisturbed sample of a lane, or up to ``TRIES`` dropped ones; a slow one has one try a round."""
    for _ in range(TRIES if lane.cost_s < SLOW_S else 1):
        rest()
        before = waited()
        start = clock()
        value = lane.measure()
        elapsed = clock() - start
        after = waited()
        wait = 0 if before is None or after is None else after - before
        if wait <= MOST_WAIT * elapsed * 1e9:
            lane.samples[turn] = value
            return
        lane.dropped += 1
