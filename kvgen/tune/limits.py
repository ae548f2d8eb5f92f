"""Time limits that follow what good candidates took: a hanging one costs little, a slow machine none."""

from __future__ import annotations

from dataclasses import dataclass

COMPILE = (20.0, 8.0, 120.0)
"""(floor, factor, cap) of one compile, in seconds."""

CHECK = (8.0, 4.0, 60.0)
"""The same of one check."""

RACE = (6.0, 6.0, 60.0)
"""The same of one request to time candidates; it follows the launches that the request asks for."""


@dataclass
class Limit:
    """Most seconds of one step: so many times what the quickest took so far, but at least the floor.

    Until one has ended well nothing is known, and the cap holds. The default is run first, so in practice
    the others are measured against it or against a better one.
    """

    floor_s: float
    factor: float
    cap_s: float
    quickest_s: float | None = None

    def took(self, seconds: float) -> None:
        """One that ended well took so long."""
        self.quickest_s = seconds if self.quickest_s is None else min(self.quickest_s, seconds)

    @property
    def seconds(self) -> float:
        """The limit now."""
        if self.quickest_s is None:
            return self.cap_s
        return max(self.floor_s, self.factor * self.quickest_s)


def race_limit(
    launch_s: float | None, setup_s: float, contenders: int, budget_s: float, launches: int
) -> float:
    """Most seconds of a request that times ``contenders`` for ``budget_s`` each.

    ``launch_s``: the quickest launch known of this workload, None where none is; ``setup_s``: what making the
    workload took; ``launches``: how many every contender makes, however slow it is.
    """
    floor, factor, cap = RACE
    if launch_s is None:
        return cap + 3 * budget_s
    return floor + 3 * setup_s + factor * contenders * (budget_s + launches * launch_s)
