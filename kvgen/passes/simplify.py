"""Simplify expressions without changing a value that a kernel would show, and bring scores to base 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from kvgen.ir.expression import COMPARISONS, REAL, Name, Node, Number, Op, Truth, children, names_of, rebuilt
from kvgen.passes.algebra import LN2, Sum, total

_LARGEST = 3.4e38
_REAL: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
}
_COMPARE: dict[str, Callable[[int | float, int | float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
FLIPPED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
"""The comparison that holds exactly where the other does not."""


_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def simplify(node: Node) -> Node:
    """The same value, of the same type, with constants folded and like integer terms collected."""
    return _Rules().apply(node)


def substitute(node: Node, values: Mapping[str, Node]) -> Node:
    """``node`` with names replaced; the result is not simplified."""
    if isinstance(node, Name):
        return values.get(node.name, node)
    parts = children(node)
    return rebuilt(node, tuple(substitute(part, values) for part in parts)) if parts else node


def base2(node: Node) -> Node:
    """A score expression over natural ``score`` as one over, and giving, base-2 units (natural * log2 e).

    ``score - slope * d`` becomes ``score - log2(e) * slope * d``: linear terms keep the coefficient 1.
    """
    natural = substitute(node, {"score": Op("*", (Name("score"), LN2))})
    return _without_ln2(simplify(_per_ln2(natural)))


def _per_ln2(node: Node) -> Node:
    """``node / ln 2``, divided where that keeps the terms of ``score`` whole."""
    if isinstance(node, Op):
        if node.op == "where":
            return Op("where", (node.args[0], _per_ln2(node.args[1]), _per_ln2(node.args[2])))
        if node.op in ("+", "-", "min", "max", "neg"):
            return Op(node.op, tuple(_per_ln2(arg) for arg in node.args))
        if node.op == "/" and not isinstance(node.args[1], Number):
            return Op("/", (_per_ln2(node.args[0]), node.args[1]))
    return Op("/", (node, LN2))


def _without_ln2(node: Node) -> Node:
    """``node`` with the number for every ln 2 that met no other constant."""
    if node == LN2:
        return Number(math.log(2))
    if isinstance(node, Op) and node.op == "/" and node.args[1] == LN2:
        return Op("*", (Number(math.log2(math.e)), _without_ln2(node.args[0])))
    return rebuilt(node, tuple(_without_ln2(part) for part in children(node)))


class _Rules:
    """Bottom-up rewriting; each distinct node is simplified once."""

    def __init__(self) -> None:
        self.known: dict[Node, Node] = {}

    def apply(self, node: Node) -> Node:
        if not children(node):
            return node
        if node not in self.known:
            if isinstance(node, Op) and node.op in ("+", "-", "*", "/", "neg"):
                self.known[node] = self.arithmetic(node)
            else:
                inner = rebuilt(node, tuple(self.apply(part) for part in children(node)))
                self.known[node] = self.folded(inner) if isinstance(inner, Op) else inner
        return self.known[node]

    def sum_of(self, node: Node) -> Sum:
        """``node`` as a sum, its atoms simplified (never itself: that would not end)."""

        def inner(part: Node) -> Node:
            return self.quotient(part) if part is node else self.apply(part)

        return Sum(node, inner)

    def arithmetic(self, node: Op) -> Node:
        result = self.sum_of(node).simple()
        if result is None:
            result = rebuilt(node, tuple(self.apply(part) for part in node.args))
        return result

    def quotient(self, node: Node) -> Node:
        """A division that no sum can hold."""
        assert isinstance(node, Op) and node.op == "/", node
        left, right = (self.apply(part) for part in node.args)
        return Op("/", (left, right))

    def folded(self, node: Op) -> Node:
        """``node``, whose arguments are simple, by the rules of its operation."""
        op, args = node.op, node.args
        if op in ("and", "or"):
            return _logic(node)
        if op == "not":
            return negated(args[0])
        if op in COMPARISONS:
            return self.compared(node)
        if op == "where":
            return _chosen(node)
        if op in ("min", "max"):
            return self.extreme(node)
        if op in ("//", "%"):
            return self.divided(node)
        if op in REAL and isinstance(args[0], Number):
            return _real(node, args[0].value)
        return _small(node)

    def difference(self, left: Node, right: Node) -> int | float | None:
        """``left - right`` where it is a known constant."""
        if isinstance(left, Number) and isinstance(right, Number):
            return left.value - right.value
        if left.type == right.type == "int":
            return self.sum_of(Op("-", (left, right))).constant
        return None

    def compared(self, node: Op) -> Node:
        left, right = node.args
        if left.type == "bool":
            same = node.op == "=="
            for value, other in ((left, right), (right, left)):
                if isinstance(value, Truth):
                    return other if value.value == same else negated(other)
            return node
        gap = self.difference(left, right)
        if gap is not None:
            return Truth(_COMPARE[node.op](gap, 0))
        return self.separated(node) if left.type == right.type == "int" else node

    def separated(self, node: Op) -> Node:
        """``q_pos - kv_pos <= 40`` as ``kv_pos >= q_pos - 40``: each side is then a vector, no matrix."""
        if not any("kv_pos" in names_of(side) and _varies(side) for side in node.args):
            return node
        terms = self.sum_of(Op("-", node.args)).terms()
        keyed = [term for term in terms if any("kv_pos" in names_of(atom) for atom in term[1])]
        rest = [term for term in terms if term not in keyed]
        if not keyed or any(_varies(atom) for _, atoms in keyed for atom in atoms):
            return node
        sign = 1 if keyed[0][0] > 0 else -1
        left = total([(sign * factor, atoms) for factor, atoms in keyed])
        right = total([(-sign * factor, atoms) for factor, atoms in rest])
        return Op(node.op if sign > 0 else _MIRRORED.get(node.op, node.op), (left, right))

    def extreme(self, node: Op) -> Node:
        left, right = node.args
        gap = self.difference(left, right)
        if left == right:
            return left
        if gap is None:
            return node
        return _as(left if (gap <= 0) == (node.op == "min") else right, node.type)

    def divided(self, node: Op) -> Node:
        """Floor division and remainder: constants, and multiples of a constant divisor."""
        left, right = node.args
        if not isinstance(right, Number):
            return node
        by = int(right.value)
        if by == 0:
            return Number(0)
        if by < 0:  # printers, bounds and proofs take a number that divides to be 1 or more
            turned = self.apply(Op(node.op, (Op("neg", (left,)), Number(-by))))
            return turned if node.op == "//" else self.apply(Op("neg", (turned,)))
        if by == 1:
            return left if node.op == "//" else Number(0)
        terms = (
            self.sum_of(left).terms() if isinstance(left, Op) and left.op in ("+", "-", "*", "neg") else None
        )
        if isinstance(left, Number):
            terms = [(left.value, ())]
        if terms is None:
            return node
        whole = [(int(factor) // by, atoms) for factor, atoms in terms if factor % by == 0 or not atoms]
        rest = [(factor if atoms else int(factor) % by, atoms) for factor, atoms in terms]
        rest = [(factor, atoms) for factor, atoms in rest if factor % by]
        whole = [(factor, atoms) for factor, atoms in whole if factor]
        if not any(atoms for _, atoms in rest):
            left_over = int(rest[0][0]) if rest else 0
            return total(list(whole)) if node.op == "//" else Number(left_over)
        if len(rest) == len(terms) and not whole:
            return node
        inner = Op(node.op, (total(list(rest)), right))
        return total([*whole, (1, (inner,))]) if node.op == "//" else inner


def negated(node: Node) -> Node:
    """``not node``; a comparison of floats is not flipped by order, as NaN compares false both ways."""
    if isinstance(node, Truth):
        return Truth(not node.value)
    if isinstance(node, Op):
        if node.op == "not":
            return node.args[0]
        exact = node.op in ("==", "!=") or all(arg.type == "int" for arg in node.args)
        if node.op in FLIPPED and exact:
            return Op(FLIPPED[node.op], node.args)
    return Op("not", (node,))


def _varies(node: Node) -> bool:
    """Whether it reads anything that is neither a key's nor the same for all of a launch or request."""
    return bool(names_of(node) & {"q_pos", "q_row", "head", "kv_head", "kv_len", "q_len"})


def _logic(node: Op) -> Node:
    left, right = node.args
    decides = node.op == "or"
    if left == right:
        return left
    for value, other in ((left, right), (right, left)):
        if isinstance(value, Truth):
            return value if value.value == decides else other
    return node


def _chosen(node: Op) -> Node:
    condition, yes, no = node.args
    if isinstance(condition, Truth):
        return _as(yes if condition.value else no, node.type)
    if isinstance(condition, Op) and condition.op == "not":
        return _chosen(Op("where", (condition.args[0], no, yes)))
    return _as(yes, node.type) if yes == no else node


def _as(node: Node, kind: str) -> Node:
    """``node`` as a float where its surroundings were one."""
    if node.type == kind:
        return node
    return Number(float(node.value)) if isinstance(node, Number) else Op("float", (node,))


def _real(node: Op, value: int | float) -> Node:
    try:
        result = float(_REAL[node.op](value))
    except (ArithmeticError, ValueError):
        return node
    return Number(result) if abs(result) < _LARGEST else node


def _small(node: Op) -> Node:
    """Casts, ``abs`` and bits of constants."""
    op, first = node.op, node.args[0]
    if op in ("int", "float") and first.type == op:
        return first
    values = [arg.value for arg in node.args if isinstance(arg, Number)]
    if op == "abs":
        if isinstance(first, Op) and first.op in ("neg", "abs"):
            return _small(Op("abs", first.args))
        return Number(abs(values[0])) if values else node
    if op in ("<<", ">>") and values and isinstance(node.args[1], Number) and values[-1] == 0:
        return first
    if op in ("int", "float") and isinstance(first, Number | Truth):
        return Number(int(first.value) if op == "int" else float(first.value))
    if len(values) < 2:
        return node
    left, right = (int(value) for value in values)
    if op in ("<<", ">>") and not 0 <= right < 64:
        return node
    if op in ("<<", ">>", "&", "|", "^"):
        result = {
            "<<": lambda: left << right,
            ">>": lambda: left >> right,
            "&": lambda: left & right,
            "|": lambda: left | right,
            "^": lambda: left ^ right,
        }[op]()
        return Number(result) if -(2**63) <= result < 2**63 else node
    return node
