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
from tests.support.interrupts import EVENTS, LINES, Place, events_of, interrupted, visits, visits_after
from tests.support.tiny_engine import check_pages, new_engine, run, tokens
from tests.support.tiny_model import SPEC, TinyModel, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

GIVEN = prompts(30, 21, 9, 17, 26)
FORMATS = {"f32": (SPEC, 20), "kivi": (None, 6)}
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
    return events_of(lambda: made.call(MARKED[call]))


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


class Marked:
    """One marked call of one run, interrupted again and again: each attempt must leave what was there."""

    def __init__(self, name: str, call: int, kinds: tuple[str, ...]) -> None:
        self.name, self.call, self.kinds = name, call, kinds
        self.begin()
        self.events = events_of(lambda: self.made.call(MARKED[call]), kinds)
        self.begin()

    def begin(self) -> None:
        """A new run, whose call is warm: kernels with shapes that were seen before are called another way."""
        self.made = until(self.name, self.call)
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            self.attempt(late(self.name, self.call))
        assert isinstance(self.made.engine.idle, bool)

    def attempt(self, *points: Point) -> list[Place]:
        """Make the call, raising at each of ``points``; the events, if it raised nothing."""
        kinds = [KeyboardInterrupt("now"), MemoryError("now")]
        at: dict[Point, BaseException] = {p: kinds[(p[0][1] + n) % 2] for n, p in enumerate(points)}
        events: list[Place] = []
        interrupted(lambda: self.made.call(MARKED[self.call]), at, events, self.kinds)
        return events

    def cross(self, *points: Point) -> bool:
        """Interrupt the call at ``points``, the later ones while the earlier are undone; whether it was."""
        told = len(self.made.events)
        try:
            self.attempt(*points)
        except (KeyboardInterrupt, MemoryError):
            assert len(self.made.events) == told, "the call both raised and told"
            assert isinstance(self.made.engine.idle, bool)  # the next call recovers
            check_pages(self.made.engine)
            return True
        self.end(self.call + 1, points)
        self.begin()
        return False

    def end(self, first: int, points: Any) -> None:
        """Make the marked calls from ``first`` on, and drain."""
        for what in MARKED[first:]:
            self.made.call(what)
        assert self.made.finish() == undisturbed(self.name), f"{self.name}, call {self.call}: {points}"

    def cross_all(self, points: list[tuple[Point, ...]]) -> int:
        """Interrupt at all ``points``; how many did not stop the call even in a new run: those that Python
        passes over, as where a generator is closed."""
        missed = 0
        for at, point in enumerate(points):
            missed += not (self.cross(*point) or self.cross(*point))
            if at % 50 == 49:  # a wrong state does not hide for long, and a request may not be told for ever
                self.end(self.call, points[at - 49 : at + 1])
                self.begin()
        self.end(self.call, points)
        self.begin()
        return missed


@pytest.mark.hours
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_at_every_line(name: str, call: int) -> None:
    """The first, the middle and the last time that each distinct line is reached, roll-back included."""
    marked = Marked(name, call, LINES)
    points = [(point,) for point in visits(marked.events)]
    assert marked.cross_all(points) <= len(points) // 20
    first = late(name, call)
    points = [(first, point) for point in roll_back(name, call, first)]
    assert marked.cross_all(points) <= len(points) // 20


@pytest.mark.slow
def test_at_2000_events() -> None:
    """Any line, call or return of a marked call, not only three visits of a line."""
    draw = random.Random(2000)
    for name, call in CALLS:
        marked = Marked(name, call, EVENTS)
        points: list[tuple[Point, ...]] = []
        for at in sorted(draw.randrange(len(marked.events)) for _ in range(2000 // len(CALLS))):
            place = marked.events[at]
            points.append(((place, marked.events[: at + 1].count(place)),))
        assert marked.cross_all(points) <= len(points) // 20
