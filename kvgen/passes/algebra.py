"""Sums and products of expressions, by sympy: like terms and constants are collected, nothing else changes.

sympy sees ``+ - *`` and division by constants only; whatever else a node holds (``//``, ``tanh``, a load, a
comparison) is a symbol to it. So it can turn no ``//`` into a fraction and no ``abs`` into cases. Integers
collect like terms. Floats collect constants only, as each occurrence of a float is a symbol of its own: what
is inf - inf or 0 * nan before stays so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import sympy
from sympy import Expr

from kvgen.ir.expression import Name, Node, Number, Op, names_of, walk

LN2 = Name("ln 2", "float")
"""The constant ln 2, kept exact until the end, so that log2(e) * ln 2 is 1."""
_LN2 = sympy.Symbol("LN2", positive=True)
_LARGEST, _SMALLEST = 3.4e38, 1.2e-38


class Sum:
    """A node as a sum of products of atoms; ``inner`` simplifies the atoms."""

    def __init__(self, node: Node, inner: Callable[[Node], Node]) -> None:
        self.node, self.inner = node, inner
        self.exact = node.type == "int"
        self.atoms: list[Node] = []
        self.plain = True
        self.expr = self._read(node)
        if self.exact:
            self.expr = sympy.expand(self.expr)

    def _read(self, node: Node) -> Expr:
        if isinstance(node, Number):
            return sympy.Rational(node.value)
        if node == LN2:
            self.plain = False
            return _LN2
        if isinstance(node, Op) and node.type == self.node.type:
            if node.op in ("+", "-", "*"):
                left, right = (self._read(arg) for arg in node.args)
                return left + right if node.op == "+" else left - right if node.op == "-" else left * right
            if node.op == "neg":
                return -self._read(node.args[0])
            if node.op == "/":
                by = self.inner(node.args[1])
                if by == LN2 or (isinstance(by, Number) and by.value):
                    return self._read(node.args[0]) / self._read(by)
            if node.op == "float" and node.args[0].type == "int":
                return self._read(node.args[0])
        simple = self.inner(node)
        if isinstance(simple, Op) and simple.op in ("+", "-", "*", "neg") and simple.type == self.node.type:
            return self._read(simple)
        return sympy.Rational(simple.value) if isinstance(simple, Number) else self._symbol(simple)

    def _symbol(self, atom: Node) -> sympy.Symbol:
        if not (self.exact and atom in self.atoms):
            self.atoms.append(atom)
            return sympy.Symbol(f"s{len(self.atoms) - 1}")
        return sympy.Symbol(f"s{self.atoms.index(atom)}")

    @property
    def constant(self) -> int | None:
        """The value of an integer sum without atoms."""
        return int(self.expr) if self.exact and self.expr.is_Integer else None

    def terms(self) -> list[tuple[int | float, tuple[Node, ...]]]:
        """(coefficient, atoms) of each product, in order of appearance, the constant last."""
        found = []
        for term in sympy.Add.make_args(self.expr):
            if term == 0:
                continue
            rational, rest = term.as_coeff_Mul()
            places, ln2 = [], 0
            for base, power in rest.as_powers_dict().items():
                if base == _LN2:
                    ln2 = int(power)
                elif base != 1:
                    places += [int(base.name[1:])] * int(power)
            factor = int(rational) if self.exact else float(rational) * math.log(2) ** ln2
            found.append((sorted(places), factor))
        found.sort(key=lambda item: (item[0][:1] or [len(self.atoms)], -len(item[0]), item[0]))
        return [(factor, tuple(self.atoms[place] for place in places)) for places, factor in found]

    def simple(self) -> Node | None:
        """The sum as a node; None where it is no smaller than before or could change a value."""
        if not self.exact and len(self.expr.free_symbols - {_LN2}) != len(self.atoms):
            return None  # a float would vanish: 0 * inf and inf - inf are not 0
        if not self.plain and [factor.is_Add for factor in sympy.Mul.make_args(self.expr)].count(True) == 1:
            self.expr = sympy.expand(self.expr)  # a constant times a sum, for which ln 2 may leave a term
        if not all(_flat(term) for term in sympy.Add.make_args(self.expr)):
            return None
        terms = self.terms()
        if any(not _fits(factor) for factor, _ in terms):
            return None
        node = _total(terms, self.exact)
        grown = sum(1 for _ in walk(node)) > sum(1 for _ in walk(self.node))
        return None if grown and self.plain else node


def _flat(term: Expr) -> bool:
    return not term.has(sympy.Add) and all(
        power.is_Integer and (power > 0 or base == _LN2)
        for base, power in term.as_powers_dict().items()
        if not base.is_Rational
    )


def _fits(factor: int | float) -> bool:
    if isinstance(factor, int):
        return abs(factor) < 2**63
    return _SMALLEST <= abs(factor) <= _LARGEST


def total(terms: list[tuple[int | float, tuple[Node, ...]]]) -> Node:
    """The node of an integer sum of (coefficient, atoms)."""
    return _total(terms, exact=True)


def _total(terms: list[tuple[int | float, tuple[Node, ...]]], exact: bool) -> Node:
    if not terms:
        return Number(0 if exact else 0.0)
    first = next((place for place, (factor, _) in enumerate(terms) if factor > 0), 0)
    node: Node | None = None
    for factor, atoms in [terms[first], *terms[:first], *terms[first + 1 :]]:
        if node is None:
            node = _product(factor, atoms)
        else:
            node = Op("+" if factor > 0 else "-", (node, _product(abs(factor), atoms)))
    assert node is not None
    return node if exact or node.type == "float" else Op("float", (node,))


def _product(factor: int | float, atoms: tuple[Node, ...]) -> Node:
    """Constants first, then what changes least: a loop over keys can take the front of it out."""
    if not atoms:
        return Number(factor)
    if factor == -1 and len(atoms) == 1:
        return Op("neg", (atoms[0],))
    ordered = [*([] if factor == 1 else [Number(factor)]), *sorted(atoms, key=_restless)]
    node = ordered[0]
    for part in ordered[1:]:
        node = Op("*", (node, part))
    return node


def _restless(atom: Node) -> int:
    """How often a value changes: by key, by query, by head or request."""
    names = names_of(atom)
    return 2 if names & {"kv_pos", "score"} else 1 if names & {"q_pos", "q_row"} else 0
