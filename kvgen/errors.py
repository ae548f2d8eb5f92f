"""The errors kvgen raises, and the diagnostic they carry.

Every message names the field, the value, the reason and what would work. A
``SpecError`` holds *all* diagnostics of a spec, so that one run shows every mistake.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final


class _Absent:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "(absent)"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


@dataclass(frozen=True)
class Diagnostic:
    """One mistake: where it is, what was there, why it cannot work, what would."""

    path: str
    """Dotted path of the field, e.g. ``cache.k.format``; or a file."""
    value: object
    """The value found there (shown with ``repr``); ``ABSENT`` where there is none."""
    reason: str
    """Why this value cannot work."""
    hint: str = ""
    """The nearest thing that works."""
    works: tuple[Any, ...] = ()
    """Values that the hint names: with each in the place of ``value``, this mistake is gone."""
    rename: str = ""
    """The key that the hint names in the place of the last one of ``path``."""

    def __str__(self) -> str:
        tail = f"; {self.hint}" if self.hint else ""
        value = "" if self.value is ABSENT else f" = {self.value!r}"
        return f"{self.path}{value}: {self.reason}{tail}"


MOST_SHOWN = 60
"""Diagnostics that a message holds; a ``SpecError`` has them all."""


class KvgenError(Exception):
    """Base of all errors raised by kvgen on purpose."""


class SpecError(KvgenError, ValueError):
    """A spec that cannot be built; holds every diagnostic, not only the first."""

    def __init__(self, diagnostics: Iterable[Diagnostic], *, unread: bool = False) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        self.unread = unread
        """Whether there was no spec to be read: the file is missing, or is no TOML."""
        count = len(self.diagnostics)
        head = [] if unread else [f"{count} mistake{'s' if count != 1 else ''} in the spec:"]
        left = count - MOST_SHOWN
        tail = [f"and {left} more mistake{'s' if left != 1 else ''}"] if left > 0 else []
        super().__init__("\n  ".join([*head, *map(str, self.diagnostics[:MOST_SHOWN]), *tail]))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), unread=self.unread), (self.diagnostics,)


class ArgumentError(KvgenError, ValueError):
    """An argument of an op that the op refuses (shape, dtype, stride, range)."""


class UnsupportedError(KvgenError, NotImplementedError):
    """A legal request that this target cannot serve; raised before any compile."""


class ToolchainError(KvgenError, RuntimeError):
    """A compiler, a driver or a binary that is missing, failed or was refused."""


class _Brief(reprlib.Repr):
    """``repr`` that neither fails nor looks into a tensor, whose memory may be gone."""

    def repr_instance(self, x: Any, level: int) -> str:
        if hasattr(x, "data_ptr"):
            return f"<{type(x).__name__}>"
        return super().repr_instance(x, level)

    def repr_int(self, x: Any, level: int) -> str:
        return repr(x) if -(10**20) < x < 10**20 else f"<an integer of {x.bit_length()} bits>"


_shorten = _Brief()
_shorten.maxstring = _shorten.maxother = 80


def brief(value: Any) -> str:
    """``repr`` on one short line: what a caller gave may be a whole array, or an endless number."""
    text = " ".join(_shorten.repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]} ... ({type(value).__name__})"
