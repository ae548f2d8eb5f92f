"""Which keys a tile of query rows sees, as texts: the ranges that decide the loops, and the predicate.

A row tile sees keys in ``[kv_lo, kv_hi)``; all of its rows see ``[full_lo, full_hi)``, so tiles inside that
need no mask, and tiles outside the first range are never visited.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir.expression import Name, Node, Number, Op, walk
from kvgen.passes.bounds import derive
from kvgen.passes.plan_triton_terms import Printer, TileLoad
from kvgen.passes.print_terms import not_negative
from kvgen.passes.simplify import substitute
from kvgen.passes.terms import Masking


@dataclass(frozen=True)
class Mask:
    """Texts over ``kv_len``, and for ragged queries ``first_pos`` (of the tile's first row), ``last_pos`` and
    ``pos_M``."""

    kv_lo: str
    kv_hi: str
    full_lo: str
    full_hi: str
    cuts: bool
    """Whether keys before ``kv_lo`` exist."""
    peels_front: bool
    """Whether the first tiles may need a mask."""
    never_full: bool
    """Whether no tile is known to be seen by every row: all are masked."""
    by_key: tuple[str, ...]
    """Conditions on the key beyond ``kv_lo <= key < kv_hi``, the same for all rows."""
    by_row: tuple[str, ...]
    """Conditions on (row, key); empty where all rows see the same keys."""
    loads: tuple[TileLoad, ...]
    """What the conditions read in each tile."""
    coded: bool = False
    """Whether tiles without a mask hold codes only: those with raw tokens are masked."""


@dataclass(frozen=True)
class Segment:
    """A run of KV tiles: one loop."""

    lo: str
    hi: str
    masked: bool
    doc: str


def mask_for(masking: Masking, printer: Printer) -> Mask:
    """The mask of one kernel; ``printer`` collects what it reads."""
    lo = _limit(masking.lo, "0", printer)
    conditions = [node for node in _conjuncts(masking, printer) if not _in_range(node, printer)]
    by_key = [node for node in conditions if printer.kind(node) in ("request", "key")]
    by_row = [node for node in conditions if node not in by_key]
    return Mask(
        kv_lo=lo,
        kv_hi=_limit(masking.hi, "kv_len", printer),
        full_lo=lo if masking.full_lo == masking.lo else _limit(masking.full_lo, "0", printer),
        full_hi=_limit(masking.full_hi, "kv_len", printer, cut=False),
        cuts=masking.lo is not None,
        peels_front=masking.lo is not None or masking.full_lo is not None,
        never_full=masking.never_full,
        by_key=tuple(_condition(printer.vector(node), node, printer) for node in by_key),
        by_row=tuple(_condition(printer.pair(node), node, printer) for node in by_row),
        loads=printer.tile_loads(conditions),
    )


def merge_ranges(masking: Masking, printer: Printer) -> dict[str, str]:
    """The splits that hold a key of a row, as texts: what the first kernel wrote for it, and no other."""
    one: dict[str, Node] = {"pos_last": Name("pos_first")}
    lo, hi = (None if n is None else substitute(n, one) for n in (masking.lo, masking.hi))
    first, end = _limit(lo, "0", printer), _limit(hi, "kv_len", printer)
    return {
        "merge_live": "" if lo is None else f"{first} < {end}",
        "merge_first": first if first == "0" else f"{first} // SPLIT_TOKENS",
        "merge_end": f"tl.cdiv({end}, SPLIT_TOKENS)",
    }


def segments(mask: Mask) -> tuple[Segment, ...]:
    """The loops over KV tiles, in order; tiles start on multiples of TILE so that a key's tile is fixed."""
    start = "kv_lo // TILE * TILE" if mask.cuts else "kv_lo"
    if mask.never_full:
        return (Segment(start, "kv_hi", True, "all tiles: any may hold keys that some row does not see"),)
    codes, raw = (" of codes", ", or with raw tokens") if mask.coded else ("", "")
    last = f"the last tiles: past the end of the keys, or not seen by every row{raw}"
    tail = Segment("body_hi", "kv_hi", True, last)
    body = Segment("body_lo", "body_hi", False, f"full tiles{codes}, seen by every row: no masks")
    if not mask.peels_front:
        return (body, tail)
    return (Segment(start, "body_lo", True, f"the first tiles: not seen by every row{raw}"), body, tail)


def _limit(node: Node | None, default: str, printer: Printer, *, cut: bool = True) -> str:
    """A bound as text, brought into 0 .. kv_len unless it is known to lie there. ``cut``: also from above."""
    if node is None:
        return default
    text = printer.vector(node)
    above = _above_kv_len(node)
    if default == "kv_len" and cut and (above is None or above > 0):
        text = f"tl.minimum({text}, kv_len)"
    return text if not_negative(node) else f"tl.maximum({text}, 0)"


def _above_kv_len(node: Node) -> int | None:
    """The most that ``node`` can be above kv_len; None where that is not known."""
    if isinstance(node, Name):
        return {"kv_len": 0, "pos_first": -1, "pos_last": -1}.get(node.name)
    if not isinstance(node, Op) or len(node.args) != 2:
        return None
    left, right = node.args
    if node.op in ("+", "-") and isinstance(right, Number) and isinstance(right.value, int):
        below = _above_kv_len(left)
        return None if below is None else below + (right.value if node.op == "+" else -right.value)
    if node.op == "-" and not_negative(right):
        return _above_kv_len(left)
    found = [known for known in map(_above_kv_len, node.args) if known is not None]
    if node.op == "min" and found:
        return min(found)
    return max(found) if node.op == "max" and len(found) == 2 else None


def _conjuncts(masking: Masking, printer: Printer) -> list[Node]:
    """The conditions that all have to hold."""
    if masking.predicate is None:
        return []
    found, todo = [], [printer.rows.settled(masking.predicate)]
    while todo:
        node = todo.pop(0)
        if isinstance(node, Op) and node.op == "and":
            todo[:0] = node.args
        else:
            found.append(node)
    return found


def _in_range(node: Node, printer: Printer) -> bool:
    """Whether ``kv_lo <= key < kv_hi`` says it: the same range of keys for every row."""
    return printer.kind(node) in ("request", "key") and derive(node).exact


def _condition(text: str, node: Node, printer: Printer) -> str:
    text = f"({text})" if " " in text else text
    if any(part.type == "bool" and printer.kind(part) == "request" for part in walk(node)):
        # The interpreter makes a byte of a truth value beside vectors, which masks no load.
        return f"({text} != 0)"
    return text
