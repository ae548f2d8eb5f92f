"""Interrupts: an exception raised at a chosen line or event of kvgen's own code while something runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvgen.runtime.transaction import Transaction

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(str(ROOT / folder) + "/" for folder in ("runtime", "kvgen"))
Place = tuple[str, int]
"""A file and a line."""


def own(frame: FrameType) -> bool:
    """Whether a frame runs code of kvgen or its runtime."""
    return (
        str(Path(frame.f_code.co_filename).resolve()).startswith(OWN) if frame.f_code.co_filename else False
    )


class _Tracer:
    """Calls ``seen`` for each line event of kvgen's code in this thread."""

    def __init__(self, seen: Callable[[Place], None]) -> None:
        self.seen = seen
        self.known: dict[str, bool] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self.known:
            self.known[name] = own(frame)
        if not self.known[name]:
            return None
        if event == "line":
            self.seen((name, frame.f_lineno))
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


def lines_of(action: Callable[[], Any]) -> list[Place]:
    """The line events of ``action``, in order."""
    found: list[Place] = []
    _Tracer(found.append).run(action)
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
) -> Any:
    """Run ``action``; the n-th time that a line is reached, raise what ``at`` has for (line, n), and take it
    out of ``at``. All line events are added to ``told``."""
    counts: Counter[Place] = Counter()

    def seen(place: Place) -> None:
        counts[place] += 1
        if told is not None:
            told.append(place)
        error = at.pop((place, counts[place]), None)
        if error is not None:
            raise error

    return _Tracer(seen).run(action)
