"""units: numbers as people read them."""

from __future__ import annotations


def scaled(seconds: float | None, unit: float) -> str:
    """A time in a unit of so many seconds, with three digits or more."""
    if seconds is None:
        return "-"
    value = seconds / unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
