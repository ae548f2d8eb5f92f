"""Integer division for sympy: FloorDiv and Mod that stay integers, and the rules that remove them.

sympy's own ``floor(a/b)`` prints as a floating-point division and cancels "divisible" terms into
``/``; an address must never see either. Both functions mean Python's ``//`` and ``%`` on
non-negative values, and both print with parentheses in every language.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr, Function, Integer


class FloorDiv(Function):  # type: ignore[misc]
    """``a // b`` for a >= 0 and an integer b >= 1."""

    nargs = (2,)

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        """Fold constants and division by one."""
        if b == 1:
            return a
        if isinstance(a, Integer) and isinstance(b, Integer):
            return Integer(int(a) // int(b))
        return None


class Mod(Function):  # type: ignore[misc]
    """``a % b`` for a >= 0 and an integer b >= 1."""

    nargs = (2,)

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        """Fold constants and the remainder of one."""
        if b == 1:
            return Integer(0)
        if isinstance(a, Integer) and isinstance(b, Integer):
            return Integer(int(a) % int(b))
        return None


@dataclass(frozen=True)
class Range:
    """Closed range of a non-negative integer."""

    low: int
    high: int


Facts = Mapping[sympy.Symbol, Range]
"""What is known of each symbol."""


def symbol(name: str) -> sympy.Symbol:
    """The integer symbol called ``name``."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def bounds(expr: Expr, facts: Facts) -> Range:
    """Smallest and largest value of a sum of products of non-negative terms (interval arithmetic)."""
    if isinstance(expr, Integer):
        return Range(int(expr), int(expr))
    if isinstance(expr, sympy.Symbol):
        if expr not in facts:
            raise KeyError(f"no range is known for {expr}")
        return facts[expr]
    if isinstance(expr, FloorDiv):
        inner, by = bounds(expr.args[0], facts), int(expr.args[1])
        return Range(inner.low // by, inner.high // by)
    if isinstance(expr, Mod):
        inner, by = bounds(expr.args[0], facts), int(expr.args[1])
        return inner if inner.high < by else Range(0, by - 1)
    parts = [bounds(arg, facts) for arg in expr.args]
    low, high = (0, 0) if isinstance(expr, sympy.Add) else (1, 1)
    for part in parts:
        if isinstance(expr, sympy.Add):
            low, high = low + part.low, high + part.high
        elif isinstance(expr, sympy.Mul):
            low, high = low * part.low, high * part.high
        else:
            raise TypeError(f"{type(expr).__name__} is not an address expression")
    return Range(low, high)


def evaluate(expr: Expr, values: Mapping[str, Any]) -> Any:
    """``expr`` at integers or integer arrays, by symbol name."""
    if isinstance(expr, Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return values[expr.name]
    parts = [evaluate(arg, values) for arg in expr.args]
    if isinstance(expr, FloorDiv):
        return parts[0] // parts[1]
    if isinstance(expr, Mod):
        return parts[0] % parts[1]
    if isinstance(expr, sympy.Add):
        return sum(parts[1:], start=parts[0])
    if isinstance(expr, sympy.Mul):
        return math.prod(parts[1:], start=parts[0])
    raise TypeError(f"{type(expr).__name__} is not an address expression")


def reduce_divisions(expr: Expr, facts: Facts) -> Expr:
    """Remove every ``//`` and ``%`` that the facts decide; the value never changes.

    Works bottom up: ``x % b`` is ``x`` and ``x // b`` is 0 where x < b; multiples of b leave both;
    nested divisions and remainders by multiples collapse.
    """
    if not expr.args:
        return expr
    expr = expr.func(*(reduce_divisions(arg, facts) for arg in expr.args))
    if isinstance(expr, FloorDiv):
        return _floor_div(expr.args[0], int(expr.args[1]), facts)
    if isinstance(expr, Mod):
        return _mod(expr.args[0], int(expr.args[1]), facts)
    return expr


def _split_multiples(a: Expr, by: int) -> tuple[Expr, Expr]:
    """``a`` as (q, r) with a == by * q + r, where q gathers the terms that ``by`` divides."""
    quotient, rest = Integer(0), Integer(0)
    for term in sympy.Add.make_args(a):
        factor, other = term.as_coeff_Mul()
        if isinstance(factor, Integer) and int(factor) % by == 0:
            quotient += Integer(int(factor) // by) * other
        else:
            rest += term
    return quotient, rest


def _floor_div(a: Expr, by: int, facts: Facts) -> Expr:
    quotient, rest = _split_multiples(a, by)
    if bounds(rest, facts).high < by:
        return quotient
    if quotient == 0 and isinstance(rest, FloorDiv):
        return FloorDiv(rest.args[0], Integer(int(rest.args[1]) * by))
    if quotient == 0 and isinstance(rest, Mod) and int(rest.args[1]) % by == 0:
        return Mod(FloorDiv(rest.args[0], Integer(by)), Integer(int(rest.args[1]) // by))
    return quotient + FloorDiv(rest, Integer(by))


def _mod(a: Expr, by: int, facts: Facts) -> Expr:
    _, rest = _split_multiples(a, by)
    if bounds(rest, facts).high < by:
        return rest
    if isinstance(rest, Mod) and int(rest.args[1]) % by == 0:
        return Mod(rest.args[0], Integer(by))
    return Mod(rest, Integer(by))
