"""Constraint expressions of schedule files: arithmetic and comparisons over named integers.

``"tile % page_size == 0 or page_size % tile == 0"``. Parsed by ``ast`` and walked over a short list
of allowed nodes: nothing is ever evaluated as code, because a schedule file is outside text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

Value = int | str | bool

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class ExpressionError(ValueError):
    """A constraint that is not one; names the expression and the column."""


def holds(text: str, names: Mapping[str, Value]) -> bool:
    """Whether the constraint ``text`` is true for these values."""
    return bool(_value(_parse(text), text, names))


@cache
def _parse(text: str) -> ast.expr:
    """The expression's tree: a space asks the same few constraints of thousands of schedules."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"constraint {text!r}, column {error.offset}: {error.msg}") from None


def _value(node: ast.expr, text: str, names: Mapping[str, Value]) -> Any:
    match node:
        case ast.Constant(value=int() | str() as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            known = ", ".join(sorted(names))
            where = f"constraint {text!r}, column {node.col_offset + 1}"
            raise ExpressionError(f"{where}: no {name!r} among {known}")
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, text, names), _value(right, text, names))
        case ast.UnaryOp(ast.Not(), operand):
            return not _value(operand, text, names)
        case ast.BoolOp(ast.And(), parts):
            return all(_value(part, text, names) for part in parts)
        case ast.BoolOp(ast.Or(), parts):
            return any(_value(part, text, names) for part in parts)
        case ast.Compare(left, ops, rights) if all(type(op) in _COMPARE for op in ops):
            values = [_value(part, text, names) for part in (left, *rights)]
            pairs = zip(ops, values, values[1:], strict=False)
            return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
    raise ExpressionError(
        f"constraint {text!r}, column {node.col_offset + 1}: {type(node).__name__} is not allowed here"
    )
