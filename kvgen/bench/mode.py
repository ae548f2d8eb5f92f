"""mode: how the memory serves several threads in each round.

Virtual machines change between two modes within seconds: with two threads it is about as fast as with one, or
twice as fast. Figures of both mixed mean nothing, so rounds in the rarer mode do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.bench.stats import paired


@dataclass(frozen=True)
class Mode:
    """What was found of a case's rounds."""

    name: str | None
    """``slow`` or ``fast``; None where there is no second thread, or more than two."""
    scaling: float | None
    """Median of the read limit of all threads over that of one."""
    others: frozenset[int]
    """Rounds in the other mode."""


def judge(many: Mapping[int, float], one: Mapping[int, float], threads: int) -> Mode:
    """The mode of most rounds, from samples of the read limit with all threads and with one.

    Fast is nearer to twice as fast than to as fast. A round without both samples counts for neither.
    """
    scaling = {turn: many[turn] / one[turn] for turn in many if turn in one}
    if threads == 1 or not scaling:
        return Mode(None, None, frozenset())
    if threads > 2:
        found = paired(many, one)
        return Mode(None, found.median if found else None, frozenset())
    modes = {turn: "fast" if ratio >= 1.5 else "slow" for turn, ratio in scaling.items()}
    (name, _), *_ = Counter(modes.values()).most_common()
    others = frozenset(turn for turn, mode in modes.items() if mode != name)
    kept = paired({t: many[t] for t in modes if t not in others}, one)
    return Mode(name, kept.median if kept else None, others)
