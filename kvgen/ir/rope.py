"""RopeSpec: rotary position embedding of K, and where it happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAIRINGS = ("half", "interleaved")
"""Which elements are rotated together: (i, i + dim/2), as in Hugging Face's Llama checkpoints, or
(2i, 2i + 1)."""

STORED = ("post", "pre")
"""K in the cache: rotated by the append, or unrotated and rotated whenever it is read."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021). q always arrives rotated."""

    kind: str
    """Name of the position scheme, registered in ``kvgen.variants``: it gives the angles' table."""
    pairing: str
    """One of ``PAIRINGS``."""
    dim: int
    """Elements that are rotated, from the first on; even. Those after them pass as they are."""
    theta: float
    """Base of the frequencies: the i-th is ``theta ** (-2i / dim)`` before the scheme changes it."""
    stored: str
    """One of ``STORED``."""
    options: tuple[tuple[str, Any], ...] = ()
    """The scheme's own keys, sorted: ``factor``, ``low_freq_factor`` and the like."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a spec file holds them."""
        plain = {"kind": self.kind, "pairing": self.pairing, "dim": self.dim, "theta": self.theta}
        return {**plain, "stored": self.stored, **dict(self.options)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RopeSpec:
        """The inverse of ``to_dict``."""
        own = ("kind", "pairing", "dim", "theta", "stored")
        options = tuple(sorted((key, value) for key, value in values.items() if key not in own))
        return cls(**{key: values[key] for key in own}, options=options)
