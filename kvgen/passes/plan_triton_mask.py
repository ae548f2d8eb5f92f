"""Which keys a tile of query rows sees, as texts: the ranges that decide the loops, and the predicate.

Query i of a request sits at position ``kv_len - q_len + i`` (bottom-right). A row tile sees keys in
``[kv_lo, kv_hi)``; all of its rows see ``[full_lo, full_hi)``, so tiles inside that need no mask, and tiles
outside the first range are never visited.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir import Spec
from kvgen.passes.plan_triton_parts import LONGEST


@dataclass(frozen=True)
class Mask:
    """Texts over ``kv_len``, and for ragged queries ``first_pos`` (of the tile's first row), ``last_pos`` and
    ``pos_M``."""

    kv_lo: str
    kv_hi: str
    full_lo: str
    full_hi: str
    by_row: tuple[str, ...]
    """Conditions on (row, key) beyond ``kv_lo <= key < kv_hi``; empty where all rows see the same keys."""
    window: int | None

    @property
    def peels_front(self) -> bool:
        """Whether the first tiles may need a mask (a window cuts into them)."""
        return self.kv_lo != "0"


@dataclass(frozen=True)
class Segment:
    """A run of KV tiles: one loop."""

    lo: str
    hi: str
    masked: bool
    doc: str


def mask_for(spec: Spec, *, ragged: bool) -> Mask:
    """The mask of the spec for one query a request (``ragged=False``) or for ragged ones."""
    att = spec.attention
    window = None if att.window is None else min(att.window, LONGEST)
    if not ragged:  # the only query is the last token: causal hides nothing
        lo = "0" if window is None else "tl.maximum(kv_len - 1 - WINDOW, 0)"
        return Mask(lo, "kv_len", lo, "kv_len", (), window)
    by_row: tuple[str, ...] = ("(key_T[None, :] <= pos_M[:, None])",) if att.causal else ()
    by_row += () if window is None else ("(key_T[None, :] >= pos_M[:, None] - WINDOW)",)
    return Mask(
        kv_lo="0" if window is None else "tl.maximum(first_pos - WINDOW, 0)",
        kv_hi="tl.maximum(last_pos + 1, 0)" if att.causal else "kv_len",
        full_lo="0" if window is None else "tl.maximum(last_pos - WINDOW, 0)",
        full_hi="tl.maximum(first_pos + 1, 0)" if att.causal else "kv_len",
        by_row=by_row,
        window=window,
    )


def segments(mask: Mask) -> tuple[Segment, ...]:
    """The loops over KV tiles, in order; tiles start on multiples of TILE so that a key's tile is fixed."""
    tail = Segment(
        "body_hi", "kv_hi", True, "the last tiles: past the end of the keys, or not seen by every row"
    )
    body = Segment("body_lo", "body_hi", False, "full tiles, seen by every row: no masks")
    if not mask.peels_front:
        return (body, tail)
    return (
        Segment("kv_lo // TILE * TILE", "body_lo", True, "tiles that the window's lower edge cuts"),
        body,
        tail,
    )
