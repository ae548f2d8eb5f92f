"""Interrupts: an exception raised at a chosen event of kvgen's own code while something runs.

Events are those of ``sys.settrace``: a line that is about to be executed, a call, a return. Where an engine's
call returns after its commit the caller has the answer; Python looks for signals at calls and jumps only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvgen.runtime.engine import Engine
from kvgen.runtime.transaction import Transaction

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(str(ROOT / folder) + "/" for folder in ("runtime", "kvgen"))
Place = tuple[str, int, str]
"""A file, a line and the kind of event."""

ANSWERS = {
    code.__code__
    for code in (
        Transaction.__exit__,
        *(getattr(Engine, name) for name in ("step", "_step", "add", "_add", "fork", "abort")),
    )
}
"""What returns when a call has committed."""


def own(frame: FrameType) -> bool:
    """Whether a frame runs code of kvgen or its runtime."""
    return (
        str(Path(frame.f_code.co_filename).resolve()).startswith(OWN) if frame.f_code.co_filename else False
    )


class _Tracer:
    """Calls ``seen`` for each event of ``kinds`` in kvgen's code in this thread."""

    def __init__(self, seen: Callable[[Place], None], kinds: tuple[str, ...]) -> None:
        self.seen, self.kinds = seen, kinds
        self.known: dict[str, bool] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self.known:
            self.known[name] = own(frame)
        if not self.known[name]:
            return None
        if event in self.kinds and not (event == "return" and frame.f_code in ANSWERS):
            self.seen((name, frame.f_lineno, event))
        return self

    def run(self, action: Callable[[], Any]) -> Any:
        """Run under the trace. Python ends a trace whose function raises: the roll-back begins it anew."""
        before, plain = sys.gettrace(), Transaction.__exit__

        def leave(*args: Any) -> None:
            sys.settrace(self)
            plain(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transaction, "__exit__", leave)
            sys.settrace(self)
            try:
                return action()
            finally:
                sys.settrace(before)


LINES = ("line",)
EVENTS = ("line", "call", "return")


def events_of(action: Callable[[], Any], kinds: tuple[str, ...] = LINES) -> list[Place]:
    """The events of ``action``, in order."""
    found: list[Place] = []
    _Tracer(found.append, kinds).run(action)
    return found


def visits(events: list[Place]) -> list[tuple[Place, int]]:
    """Each distinct line with the visits at which to interrupt it: the first, the middle and the last."""
    counts = Counter(events)
    return sorted({(p, n) for p, total in counts.items() for n in (1, (total + 1) // 2, total)})


def visits_after(events: list[Place], start: int) -> list[tuple[Place, int]]:
    """As ``visits``, of the events from ``start`` on, counted from the first event of all."""
    before = Counter(events[:start])
    return sorted((place, before[place] + n) for place, n in visits(events[start:]))


def interrupted(
    action: Callable[[], Any],
    at: dict[tuple[Place, int], BaseException],
    told: list[Place] | None = None,
    kinds: tuple[str, ...] = LINES,
) -> Any:
    """Run ``action``; the n-th time that a place is reached, raise what ``at`` has for (place, n), and take
    it out of ``at``. All events are added to ``told``."""
    counts: Counter[Place] = Counter()

    def seen(place: Place) -> None:
        counts[place] += 1
        if told is not None:
            told.append(place)
        error = at.pop((place, counts[place]), None)
        if error is not None:
            raise error

    return _Tracer(seen, kinds).run(action)
