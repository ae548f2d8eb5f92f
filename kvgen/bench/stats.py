"""stats: what is said of samples: median, quartiles, and ratios of pairs from the same round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """The middle of some samples, and how far they spread."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    count: int

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, over the median: 0.02 reads as plus or minus 2%."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def figure(samples: Iterable[float]) -> Figure | None:
    """Median and quartiles; None of no samples."""
    values = sorted(samples)
    if not values:
        return None
    if len(values) == 1:
        return Figure(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(middle, low, high, len(values))


def paired(tops: Mapping[int, float], bottoms: Mapping[int, float]) -> Figure | None:
    """The figure of top over bottom, of the rounds that have both.

    Pairs of one round hold the machine's speed alike: a machine that changes between two speeds moves a ratio
    of two medians, but not the median of such ratios.
    """
    return figure(top / bottoms[turn] for turn, top in tops.items() if turn in bottoms)
