"""Prove that one integer expression is never below another, so that bounds say nothing twice."""

from __future__ import annotations

from collections.abc import Mapping

from kvgen.ir.expression import Name, Node, Number, Op
from kvgen.passes.algebra import Sum, total
from kvgen.passes.simplify import simplify

LENGTHS = frozenset({"kv_pos", "q_row", "head", "kv_head", "batch", "kv_len", "q_len"})
"""Names that are never negative."""
_DEEPEST = 4
_Terms = list[tuple[int | float, tuple[Node, ...]]]


def never_below(node: Node, least: Node, values: Mapping[str, int] | None = None) -> bool:
    """Whether ``node >= least`` for every value of their names. ``values``: of constants in capitals.

    False means that no proof was found. Lengths are not negative; a constant that divides is 1 or more.
    """
    return _at_least_0(Op("-", (node, least)), values or {}, _DEEPEST)


def _at_least_0(node: Node, values: Mapping[str, int], depth: int) -> bool:
    terms: _Terms = Sum(node, simplify).terms()
    for place, (factor, atoms) in enumerate(terms):
        rest = terms[:place] + terms[place + 1 :]
        atom = atoms[0] if len(atoms) == 1 else None
        if depth and isinstance(atom, Op) and atom.op in ("min", "max"):
            sides = (total([*rest, (factor, (side,))]) for side in atom.args)
            proofs = [_at_least_0(side, values, depth - 1) for side in sides]
            return all(proofs) if (atom.op == "min") == (factor > 0) else any(proofs)
        least = _multiple(factor, atoms)
        if depth and least is not None:
            return _at_least_0(Op("+", (total(rest), least)), values, depth - 1)
    return sum(_smallest(factor, atoms, values) for factor, atoms in terms) >= 0


def _multiple(factor: int | float, atoms: tuple[Node, ...]) -> Node | None:
    """The least that ``factor * C * (x // C)`` can be: the multiple is at most x, and more than x - C."""
    for atom in atoms:
        if not (isinstance(atom, Op) and atom.op == "//"):
            continue
        inner, by = atom.args
        others = [other for other in atoms if other is not atom]
        if isinstance(by, Number):
            times, left = divmod(factor, by.value)
            fits = not others and left == 0
        else:
            times, fits = factor, isinstance(by, Name) and by.name.isupper() and others == [by]
        if fits:
            one = Number(1)
            least = inner if factor < 0 else Op("-", (inner, Op("-", (by, one))))
            return Op("*", (Number(times), least))
    return None


def _smallest(factor: int | float, atoms: tuple[Node, ...], values: Mapping[str, int]) -> float:
    """The least that a term can be, or minus infinity."""
    known: float = factor
    low, high = 1.0, 1.0
    for atom in atoms:
        if isinstance(atom, Name) and atom.name in values:
            known *= values[atom.name]
        elif isinstance(atom, Name) and atom.name in LENGTHS:
            low, high = 0.0, float("inf")
        else:
            return float("-inf")
    return known * low if known >= 0 else known * high
