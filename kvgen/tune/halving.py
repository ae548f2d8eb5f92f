"""halving: successive halving of contenders. The more promising one is, the longer it is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

Measure = Callable[[int, Sequence[T]], dict[T, float]]
"""``measure(round, contenders)``: a figure for each (smaller is better), all of them in turn in one session;
the budget doubles with each round. Who failed is missing from the answer."""

FINALISTS = 3
"""Rounds end when no more than these are left."""


def halve(contenders: Sequence[T], measure: Measure[T], *, finalists: int = FINALISTS) -> dict[T, float]:
    """The figure of each contender from the last round it was in; the worse half leaves after each round."""
    figures: dict[T, float] = {}
    left = list(contenders)
    level = 0
    while left:
        found = measure(level, left)
        for lost in left:  # who fails in a later round must not keep the figure of an earlier one
            figures.pop(lost, None)
        figures.update(found)
        left = sorted(found, key=found.__getitem__)  # stable: ties keep the order they came in
        if len(left) <= finalists:
            break
        left = left[: max(finalists, (len(left) + 1) // 2)]
        level += 1
    return figures
