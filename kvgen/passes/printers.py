"""Print integer expressions as C++ and as Python (Triton). Divisions are always parenthesised."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from sympy import Expr

from kvgen.passes.integers import FloorDiv, Mod


def print_c(expr: Expr, names: Mapping[str, str]) -> str:
    """C++ text: operands are non-negative, so C's ``/`` and ``%`` mean ``//`` and ``%``."""
    return _show(expr, names, "/")


def print_python(expr: Expr, names: Mapping[str, str]) -> str:
    """Python or Triton text."""
    return _show(expr, names, "//")


def _show(expr: Expr, names: Mapping[str, str], divide: str) -> str:
    if isinstance(expr, sympy.Integer):
        return str(int(expr))
    if isinstance(expr, sympy.Symbol):
        return _atom(names.get(expr.name, expr.name))
    if isinstance(expr, FloorDiv | Mod):
        sign = divide if isinstance(expr, FloorDiv) else "%"
        return f"({_show(expr.args[0], names, divide)} {sign} {int(expr.args[1])})"
    if isinstance(expr, sympy.Add):
        return "(" + " + ".join(_show(arg, names, divide) for arg in expr.args) + ")"
    if isinstance(expr, sympy.Mul):
        return " * ".join(_show(arg, names, divide) for arg in expr.args)
    raise TypeError(f"{type(expr).__name__} is not an address expression")


def _atom(text: str) -> str:
    """A name, call or index stays as it is; anything with an operator is parenthesised."""
    depth = 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if depth == 0 and char in " +-*/%":
            return f"({text})"
    return text
