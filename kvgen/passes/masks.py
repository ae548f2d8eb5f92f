"""Mask terms: who sees whom, and which keys a block of queries needs at all.

Each term gives a predicate for one (key, query) pair and the bounds it puts on a block of queries
at positions ``pos_first`` .. ``pos_last``: the keys that any of them sees (``lo``, ``hi``) and those
that all of them see (``full_lo``, ``full_hi``). Empty tiles are never visited and full ones never
masked. The texts are integer expressions that mean the same in C++ and in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir import AttentionSpec


@dataclass(frozen=True)
class MaskTerm:
    """One reason for a key to be invisible. An empty text means no bound."""

    name: str
    visible: str
    """Predicate over ``key`` and ``pos``, both logical positions."""
    lo: str = ""
    """First key that some query of the block sees."""
    hi: str = ""
    """One past the last key that some query of the block sees."""
    full_lo: str = ""
    """First key that every query of the block sees."""
    full_hi: str = ""
    """One past the last key that every query of the block sees."""


CAUSAL = MaskTerm("causal", "key <= pos", hi="pos_last + 1", full_hi="pos_first + 1")
WINDOW = MaskTerm("window", "key + WINDOW >= pos", lo="pos_first - WINDOW", full_lo="pos_last - WINDOW")


def mask_terms(att: AttentionSpec) -> tuple[MaskTerm, ...]:
    """The mask terms of an attention spec; none for full attention."""
    return ((CAUSAL,) if att.causal else ()) + ((WINDOW,) if att.window is not None else ())
