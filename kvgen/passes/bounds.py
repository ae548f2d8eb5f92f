"""Which keys a block of queries needs, derived from a predicate over ``kv_pos`` and ``q_pos``.

A comparison of integers is solved for ``kv_pos``: what remains is an expression of ``q_pos``, whose least and
largest value over ``pos_first .. pos_last`` bound the keys that some query sees (``lo``, ``hi``) and those
that all see (``full_lo``, ``full_hi``). ``//``, ``abs``, ``min`` and ``max`` are solved too. What cannot be
solved (a load at ``kv_pos``, a remainder, a head) bounds nothing and is never full. A constant in capitals
that divides is taken to be 1 or more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.ir.expression import Name, Node, Number, Op, Truth, names_of, walk
from kvgen.passes.algebra import Sum, total
from kvgen.passes.prove import never_below
from kvgen.passes.simplify import negated, simplify, substitute

KNOWN = frozenset({"q_pos", "kv_pos", "kv_len", "q_len", "batch"})
"""Names that are the same for all rows and heads of a block, or are solved for."""
_Ends = tuple[Node, Node]


@dataclass(frozen=True)
class Bounds:
    """Key ranges of a block of queries at positions ``pos_first .. pos_last``; None is no bound.

    They are not cut to ``0 .. kv_len`` and may be empty (``hi <= lo``). The nodes are integers over
    ``pos_first``, ``pos_last``, ``kv_len``, ``q_len``, constants and parameters.
    """

    lo: Node | None = None
    """No query sees a key before it."""
    hi: Node | None = None
    """No query sees this key or a later one."""
    full_lo: Node | None = None
    """All queries see the keys from here..."""
    full_hi: Node | None = None
    """... to before here."""
    never_full: bool = False
    """No key is known to be seen by all: the full range is empty, whatever its ends say."""
    exact: bool = True
    """Where pos_first == pos_last, the predicate is ``lo <= kv_pos < hi``."""


UNKNOWN = Bounds(never_full=True, exact=False)
"""Of a predicate that says nothing about ranges."""


def derive(node: Node) -> Bounds:
    """Bounds of the predicate ``node``; as tight as intervals can be for comparisons linear in positions."""
    row = Op("-", (Name("q_pos"), Op("-", (Name("kv_len"), Name("q_len")))))
    node = simplify(node)
    if any(isinstance(part, Name) and part.name == "q_row" for part in walk(node)):
        node = substitute(node, {"q_row": row})
    divisors = frozenset(
        part.args[1].name
        for part in walk(node)
        if isinstance(part, Op) and part.op in ("//", "%") and isinstance(part.args[1], Name)
    )
    return _Solver(frozenset(name for name in divisors if name.isupper())).predicate(node)


def both(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of ``a and b``."""
    return Bounds(
        lo=_pick("max", a.lo, b.lo),
        hi=_pick("min", a.hi, b.hi),
        full_lo=_pick("max", a.full_lo, b.full_lo),
        full_hi=_pick("min", a.full_hi, b.full_hi),
        never_full=a.never_full or b.never_full,
        exact=a.exact and b.exact,
    )


def either(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of ``a or b``: the hull; exact where both start, or both end, at the same key."""
    lo = None if a.lo is None or b.lo is None else _pick("min", a.lo, b.lo)
    hi = None if a.hi is None or b.hi is None else _pick("max", a.hi, b.hi)
    exact = a.exact and b.exact and (a.lo == b.lo or a.hi == b.hi)
    wide = Bounds(lo, hi, exact=exact)
    if a.never_full or b.never_full:
        one = b if a.never_full else a
        return replace(wide, full_lo=one.full_lo, full_hi=one.full_hi, never_full=one.never_full)
    if a.full_lo == b.full_lo:
        full_hi = None if a.full_hi is None or b.full_hi is None else _pick("max", a.full_hi, b.full_hi)
        return replace(wide, full_lo=a.full_lo, full_hi=full_hi)
    if a.full_hi == b.full_hi:
        full_lo = None if a.full_lo is None or b.full_lo is None else _pick("min", a.full_lo, b.full_lo)
        return replace(wide, full_lo=full_lo, full_hi=a.full_hi)
    one = max((a, b), key=_reach)  # two ranges apart: one of them has to do
    return replace(wide, full_lo=one.full_lo, full_hi=one.full_hi)


def _reach(bounds: Bounds) -> int:
    """Guess at which full range is longer: one without an end, or with an end that moves along."""
    ends = (bounds.full_lo, bounds.full_hi)
    return sum(2 if end is None else not isinstance(end, Number) for end in ends)


def _pick(op: str, a: Node | None, b: Node | None) -> Node | None:
    """The smaller (``min``) or larger of two ends, None being no end."""
    if a is None or b is None:
        return b if a is None else a
    for one, other in ((a, b), (b, a)):
        if never_below(one, other):
            return other if op == "min" else one
    return simplify(Op(op, (a, b)))


def _sum(left: Node, op: str, right: Node) -> Node:
    return Op(op, (left, right))


class _Solver:
    """Solves predicates for ``kv_pos``; names in ``positive`` are 1 or more."""

    def __init__(self, positive: frozenset[str]) -> None:
        self.positive = positive

    def predicate(self, node: Node) -> Bounds:
        if isinstance(node, Truth):
            return Bounds() if node.value else Bounds(hi=Number(0), full_hi=Number(0))
        if not isinstance(node, Op):
            return UNKNOWN
        if not names_of(node) & {"kv_pos", "q_pos"} and all(map(self.shared, names_of(node))):
            end = Op("where", (node, Name("kv_len"), Number(0)))  # all keys of the request, or none
            return Bounds(hi=end, full_hi=end)
        if node.op == "and":
            return both(*(self.predicate(arg) for arg in node.args))
        if node.op == "or":
            return either(*(self.predicate(arg) for arg in node.args))
        if node.op == "not":
            return self.opposite(node.args[0])
        if node.op == "where":
            condition, yes, no = node.args
            first = both(self.predicate(condition), self.predicate(yes))
            return either(first, both(self.opposite(condition), self.predicate(no)))
        left, right = node.args if len(node.args) == 2 else (node, node)
        if left.type != "int" or right.type != "int":
            return UNKNOWN
        return self.compared(node.op, left, right)

    def opposite(self, node: Node) -> Bounds:
        """Bounds of ``not node``."""
        if isinstance(node, Op) and node.op in ("and", "or"):
            parts = (self.opposite(arg) for arg in node.args)
            return either(*parts) if node.op == "and" else both(*parts)
        other = negated(node)
        return UNKNOWN if isinstance(other, Op) and other.op == "not" else self.predicate(other)

    def compared(self, op: str, left: Node, right: Node) -> Bounds:
        above, below = _sum(left, "-", right), _sum(right, "-", left)
        one = Number(1)
        if op == ">=":
            return self.at_least_0(above)
        if op == "<=":
            return self.at_least_0(below)
        if op == ">":
            return self.at_least_0(_sum(above, "-", one))
        if op == "<":
            return self.at_least_0(_sum(below, "-", one))
        if op == "==":
            return both(self.at_least_0(above), self.at_least_0(below))
        if op == "!=":
            less, more = self.at_least_0(_sum(below, "-", one)), self.at_least_0(_sum(above, "-", one))
            return either(less, more)
        return UNKNOWN

    def at_least_0(self, node: Node) -> Bounds:
        """Bounds of ``node >= 0``."""
        terms = Sum(node, simplify).terms()
        keyed = [term for term in terms if any("kv_pos" in names_of(atom) for atom in term[1])]
        if not terms or not terms[0][1]:
            return self.predicate(Truth(not terms or terms[0][0] >= 0))
        if len(keyed) != 1 or len(keyed[0][1]) != 1:
            return UNKNOWN
        (factor, (atom,)) = keyed[0]
        rest = total([term for term in terms if term is not keyed[0]])
        limit = rest if abs(factor) == 1 else Op("//", (rest, Number(abs(factor))))
        if factor > 0:  # atom >= -limit
            return self.from_below(atom, Op("neg", (limit,)))
        return self.from_above(atom, limit)

    def from_below(self, atom: Node, least: Node) -> Bounds:
        """Bounds of ``atom >= least``, where only ``atom`` reads ``kv_pos``."""
        if atom == Name("kv_pos"):
            ends = self.ends(simplify(least))
            return UNKNOWN if ends is None else Bounds(lo=ends[0], full_lo=ends[1])
        if not isinstance(atom, Op):
            return UNKNOWN
        if atom.op == "//" and self.divides(atom.args[1]):
            return self.at_least_0(_sum(atom.args[0], "-", _sum(least, "*", atom.args[1])))
        parts = [self.at_least_0(_sum(side, "-", least)) for side in _sides(atom)]
        if len(parts) == 2:
            return both(*parts) if atom.op == "min" else either(*parts)
        return UNKNOWN

    def from_above(self, atom: Node, most: Node) -> Bounds:
        """Bounds of ``atom <= most``, where only ``atom`` reads ``kv_pos``."""
        if atom == Name("kv_pos"):
            ends = self.ends(simplify(_sum(most, "+", Number(1))))
            return UNKNOWN if ends is None else Bounds(hi=ends[1], full_hi=ends[0])
        if not isinstance(atom, Op):
            return UNKNOWN
        if atom.op == "//" and self.divides(atom.args[1]):
            past = _sum(_sum(most, "*", atom.args[1]), "+", atom.args[1])
            return self.at_least_0(_sum(_sum(past, "-", Number(1)), "-", atom.args[0]))
        parts = [self.at_least_0(_sum(most, "-", side)) for side in _sides(atom)]
        if len(parts) == 2:
            return either(*parts) if atom.op == "min" else both(*parts)
        return UNKNOWN

    def divides(self, node: Node) -> bool:
        return isinstance(node, Number) or (isinstance(node, Name) and node.name in self.positive)

    def ends(self, node: Node) -> _Ends | None:
        """Smallest and largest value over the queries of a block; None where that cannot be told."""
        if any(isinstance(part, Name) and not self.shared(part.name) for part in walk(node)):
            return None
        low, high = [], []
        for factor, atoms in Sum(node, simplify).terms():
            moving = [atom for atom in atoms if "q_pos" in names_of(atom)]
            if not moving:
                low.append((factor, atoms))
                high.append((factor, atoms))
                continue
            others = tuple(atom for atom in atoms if atom not in moving)
            inner = self.ends_of_atom(moving[0]) if len(moving) == 1 else None
            if inner is None:
                return None
            at_low, at_high = ((factor, (*others, end)) for end in inner)
            if not all(self.divides(other) for other in others):  # a factor of unknown sign
                products = tuple(total([term]) for term in (at_low, at_high))
                at_low, at_high = (1, (Op("min", products),)), (1, (Op("max", products),))
            elif factor < 0:
                at_low, at_high = at_high, at_low
            low.append(at_low)
            high.append(at_high)
        return simplify(total(low)), simplify(total(high))

    def shared(self, name: str) -> bool:
        return name in KNOWN or name in ("pos_first", "pos_last") or name.isupper()

    def ends_of_atom(self, atom: Node) -> _Ends | None:
        if atom == Name("q_pos"):
            return Name("pos_first"), Name("pos_last")
        if not isinstance(atom, Op):
            return None
        if atom.op == "//" and self.divides(atom.args[1]):
            inner = self.ends(atom.args[0])
            return None if inner is None else (_over(inner[0], atom), _over(inner[1], atom))
        if atom.op not in ("min", "max", "abs"):
            return None
        first, second = (self.ends(side) for side in _sides(atom))
        if first is None or second is None:
            return None
        op = "min" if atom.op == "min" else "max"
        low, high = Op(op, (first[0], second[0])), Op(op, (first[1], second[1]))
        return (Op("max", (low, Number(0))) if atom.op == "abs" else low), high


def _over(end: Node, division: Op) -> Node:
    return Op("//", (end, division.args[1]))


def _sides(atom: Op) -> tuple[Node, ...]:
    """The two values of which a ``min`` or ``max`` is one; ``abs`` is the larger of x and -x."""
    if atom.op == "abs":
        return atom.args[0], Op("neg", atom.args)
    return atom.args if atom.op in ("min", "max") else ()
