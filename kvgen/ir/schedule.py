"""Schedule: how a kernel runs, never what it computes. A frozen value: searchable, printable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Knob = int | str | bool
"""A knob's value."""


@dataclass(frozen=True)
class Schedule:
    """Knob settings for one template, as sorted (name, value) pairs."""

    knobs: tuple[tuple[str, Knob], ...]

    @classmethod
    def of(cls, knobs: Mapping[str, Knob]) -> Schedule:
        """A schedule from a mapping, in the canonical order."""
        return cls(tuple(sorted(knobs.items())))

    def __getitem__(self, name: str) -> Knob:
        for key, value in self.knobs:
            if key == name:
                return value
        raise KeyError(name)

    def int(self, name: str) -> int:
        """The integer knob ``name``."""
        value = self[name]
        if not isinstance(value, int):
            raise TypeError(f"knob {name} is {value!r}, not an integer")
        return value

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.knobs)

    def to_dict(self) -> dict[str, Knob]:
        """The knobs as a plain mapping."""
        return dict(self.knobs)

    def replace(self, **changes: Knob) -> Schedule:
        """This schedule with some knobs changed."""
        return Schedule.of(self.to_dict() | changes)

    @property
    def hash8(self) -> str:
        """First 8 digits of the sha256 of the knobs."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.knobs)
