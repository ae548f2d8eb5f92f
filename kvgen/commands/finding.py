"""Finding: one line of what ``kvgen doctor`` reports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    section: str
    name: str
    value: str
    hint: str = ""
    """How to get what is missing; empty where nothing is."""
