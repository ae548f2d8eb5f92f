"""clock: a budget of seconds, and what was left out because it did not fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Skip:
    """A step that was left out."""

    what: str
    reason: str


@dataclass
class Clock:
    """Time left of a budget. A step says how long it may take, and is skipped where that is too long."""

    seconds: float
    now: Callable[[], float] = time.monotonic
    skips: list[Skip] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = self.now()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.now() - self._start

    @property
    def left(self) -> float:
        """Seconds until the budget is used up; negative afterwards."""
        return self.seconds - self.spent

    def fits(self, what: str, needs_s: float) -> bool:
        """Whether a step of ``needs_s`` seconds still fits; where not, it is noted as skipped."""
        if needs_s <= self.left:
            return True
        self.skip(
            what,
            f"needs about {needs_s:.0f} s, and {max(0.0, self.left):.0f} s of {self.seconds:.0f} are left",
        )
        return False

    def skip(self, what: str, reason: str) -> None:
        """Note a step that was left out."""
        self.skips.append(Skip(what, reason))

    def share(self, seconds: float) -> Clock:
        """A clock of at most ``seconds`` of what is left, which notes its skips here."""
        return Clock(max(0.0, min(seconds, self.left)), self.now, self.skips)
