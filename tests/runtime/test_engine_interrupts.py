"""An engine's calls commit whole or not at all, at whatever line of kvgen an exception is raised.

A run that is far on (prompts in pieces, forks, a preemption to come) is stopped at every distinct line that
its next calls execute, and goes on: no page is lost, all is told once, and tokens are those of an
undisturbed run.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from kvgen.runtime.sampling import Sampled
from tests.runtime.test_engine_company import kivi
from tests.support.interrupts import Place, interrupted, lines_of, visits, visits_after
from tests.support.tiny_engine import check_pages, new_engine, run, tokens
from tests.support.tiny_model import SPEC, TinyModel, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

GIVEN = prompts(30, 21, 9, 17, 26)
FORMATS = {"f32": (SPEC, 20), "kivi": (None, 8)}
MARKED = ["add", "step", "fork", "step", "abort", "step", "step", "step"]
"""What is interrupted, call by call."""


class Run:
    """An engine in the middle of its work, and all that it has told."""

    def __init__(self, name: str) -> None:
        spec, pages = FORMATS[name][0] or kivi(), FORMATS[name][1]
        model = TinyModel(spec, max_positions=96)
        self.engine = new_engine(pages, spec, model, chunk=16, max_batch=4)
        self.events: list[Any] = []
        self.ids = [self.engine.add(p, max_new_tokens=12, sampling=how(at)) for at, p in enumerate(GIVEN)]
        for _ in range(5):
            self.events += self.engine.step()

    def call(self, what: str) -> None:
        """One call; what it told is kept when it has returned."""
        if what == "step":
            self.events += self.engine.step()
        elif what == "add":
            self.ids.append(self.engine.add(prompts(13)[0], max_new_tokens=5))
        elif what == "fork":
            self.ids.append(self.engine.fork(self.ids[0]))
        else:
            self.engine.abort(self.ids[1])

    def finish(self) -> list[list[int]]:
        """Drain; the tokens of each request."""
        self.events += run(self.engine)
        assert not any(event.reason == "error" for event in self.events)
        return [tokens(self.events, i) for i in self.ids]


def how(at: int) -> Any:
    return Sampled(2.0, seed=at) if at % 2 else Sampled(2.0)


Point = tuple[Place, int]


def until(name: str, call: int) -> Run:
    """A run before its ``call``-th marked call."""
    made = Run(name)
    for what in MARKED[:call]:
        made.call(what)
    return made


def stopped(name: str, call: int, *points: Point) -> None:
    """Interrupt a marked call at the first point, and what is executed after that at the second; go on."""
    made, plan = until(name, call), dict.fromkeys(points)
    kinds = [KeyboardInterrupt("now"), MemoryError("now")]
    at = {point: kinds[(point[0][1] + n) % 2] for n, point in enumerate(plan)}
    told = len(made.events)
    while True:
        try:
            interrupted(lambda: made.call(MARKED[call]), at)
            break
        except (KeyboardInterrupt, MemoryError):
            assert len(made.events) == told, "the call both raised and told"
            if not made.engine.saved:
                check_pages(made.engine)
    assert not at, "a point was not reached"
    check_pages(made.engine)
    for what in MARKED[call + 1 :]:
        made.call(what)
    assert made.finish() == undisturbed(name), f"{name}, {MARKED[call]} ({call}): {points}"


@cache
def undisturbed(name: str) -> list[list[int]]:
    return until(name, len(MARKED)).finish()


@cache
def lines(name: str, call: int) -> list[Place]:
    """The line events of a marked call."""
    made = until(name, call)
    return lines_of(lambda: made.call(MARKED[call]))


def roll_back(name: str, call: int, point: Point) -> list[Point]:
    """The visits of lines that are executed after a marked call was interrupted at ``point``."""
    made, events, at = until(name, call), list[Place](), {point: KeyboardInterrupt("now")}
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: made.call(MARKED[call]), at, events)
    counts = [n for n, place in enumerate(events) if place == point[0]]
    return visits_after(events, counts[point[1] - 1] + 1)


def late(name: str, call: int) -> Point:
    """A point near the end of a marked call: the last line that the scheduler executes."""
    events = lines(name, call)
    place = [place for place in events if place[0].endswith("runtime/scheduler.py")][-1]
    return place, events.count(place)


CALLS = [(name, call) for name in FORMATS for call in range(len(MARKED))]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_at_some_lines(name: str, call: int) -> None:
    """A few of the points of the slow tests below, others for each call."""
    points = visits(lines(name, call))
    for point in random.Random(call).sample(points, 6):
        stopped(name, call, point)
    first = late(name, call)
    for point in random.Random(call).sample(roll_back(name, call, first), 2):
        stopped(name, call, first, point)


@pytest.mark.hours
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_at_every_line(name: str, call: int) -> None:
    """The first, the middle and the last time that each distinct line is reached, roll-back included."""
    for point in visits(lines(name, call)):
        stopped(name, call, point)
    first = late(name, call)
    for point in roll_back(name, call, first):
        stopped(name, call, first, point)


@pytest.mark.hours
def test_at_2000_events() -> None:
    """Any event of any marked call, not only three visits of a line."""
    draw = random.Random(2000)
    for _ in range(2000):
        name, call = draw.choice(CALLS)
        events = lines(name, call)
        at = draw.randrange(len(events))
        stopped(name, call, (events[at], events[: at + 1].count(events[at])))
