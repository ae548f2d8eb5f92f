"""terms: masks and scores of a spec, evaluated text by text in numpy.

A walker of its own over Python's syntax tree, in float64 and int64: it shares the texts with the compiler,
but neither its parser nor its algebra nor its printers. Texts are checked when a spec is loaded; what is no
part of the language raises ``ArgumentError`` here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from kvgen.errors import ArgumentError
from kvgen.ir import AttentionSpec
from kvgen.reference.codec import Array
from kvgen.variants import Definition, Formula, definitions

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "min": lambda *x: _fold(np.minimum, x),
    "max": lambda *x: _fold(np.maximum, x),
    "where": np.where,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "float": lambda x: np.asarray(x, np.float64),
    "int": lambda x: np.trunc(x).astype(np.int64),
}
BINARY: Mapping[type, Callable[..., Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
    ast.BitAnd: np.bitwise_and,
    ast.BitOr: np.bitwise_or,
    ast.BitXor: np.bitwise_xor,
    ast.LShift: np.left_shift,
    ast.RShift: np.right_shift,
}
COMPARE: Mapping[type, Callable[..., Any]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
UNARY: Mapping[type, Callable[..., Any]] = {
    ast.USub: np.negative,
    ast.UAdd: np.positive,
    ast.Not: np.logical_not,
    ast.Invert: np.logical_not,
}


class Terms:
    """The masks, scores and sink of a spec with the parameters of one call."""

    def __init__(
        self,
        att: AttentionSpec,
        params: Mapping[str, Array] | None = None,
        batch: int = 0,
        row: int = 0,
        place: tuple[int, int] | None = None,
    ) -> None:
        """``params``: an array for each of the spec's parameters, bits packed. Missing ones are an error.
        ``batch``, ``row``: the request and the query row that calls count from. ``place``: calls have one
        query, which is this one of so many."""
        self.att, self.batch, self.row, self.place = att, batch, row, place
        self.params = dict(params or {})
        missing = [p.name for p in att.params if p.name not in self.params]
        if missing:
            reads = ", ".join(p.name for p in att.params)
            raise ArgumentError(f"params[{missing[0]!r}] is missing; the spec reads {reads}")

    def at(self, batch: int, row: int, place: tuple[int, int] | None = None) -> Terms:
        """The same for calls that count from another request and row, or have only one query."""
        return Terms(self.att, self.params, batch, row, place)

    def visible(self, batch: int, first_row: int, q_len: int, kv_len: int) -> Array:
        """bool [q_heads or 1, q, kv]: who sees whom in request ``batch``, whose first query row is given."""
        names = self._names(batch, first_row, q_len, kv_len)
        seen = np.ones((1, q_len, kv_len), bool)
        for _, formula in self._active("mask"):
            seen = seen & _evaluate(formula, names, self._load)
        return seen

    def scored(self, score: Array, batch: int, first_row: int) -> Array:
        """Scores [q_heads, q, kv] in natural units after all score terms."""
        names = self._names(batch, first_row, *score.shape[1:])
        for _, formula in self._active("score"):
            value = _evaluate(formula, {**names, "score": score}, self._load)
            score = np.broadcast_to(np.asarray(value, np.float64), score.shape)  # it may read no score or key
        return score

    @cached_property
    def sink(self) -> Array | None:
        """f64 [q_heads]: the sink's logits; None where the spec has none."""
        return np.asarray(self.params["sink_logit"], np.float64) if self.att.sink else None

    def _active(self, kind: str) -> list[tuple[Definition, Formula]]:
        """Its own rule of what is present: a key that the spec gives, other than ``false``."""
        given = {"causal": self.att.causal, "window": self.att.window, **dict(self.att.options)}
        found = [(d, given[d.name]) for d in definitions(kind) if d.name in given]
        return [(d, d.formula(v, self.att.q_heads)) for d, v in found if not isinstance(v, bool | None) or v]

    def _names(self, batch: int, first_row: int, q_len: int, kv_len: int) -> dict[str, Any]:
        i = np.arange(q_len)[None, :, None]
        if self.place is not None:
            i, q_len = i + self.place[0], self.place[1]
        head = np.arange(self.att.q_heads)[:, None, None]
        return {
            "q_pos": i + kv_len - q_len,
            "q_row": i + first_row + self.row,
            "kv_pos": np.arange(kv_len)[None, None, :],
            "head": head,
            "kv_head": head // self.att.group,
            "batch": np.int64(batch + self.batch),
            "kv_len": np.int64(kv_len),
            "q_len": np.int64(q_len),
        }

    def _load(self, name: str, index: list[Any]) -> Array:
        """An element of a parameter; positions before the first read as it."""
        param = self.att.param(name)
        values: Array = self.params[name]
        if param.dtype == "bits":
            values = np.unpackbits(values, axis=-1, bitorder="little")
        found: Array = values[tuple(np.maximum(at, 0) for at in index)]
        if param.dtype in ("bool", "bits"):
            return found.astype(bool)
        return found.astype(np.float64 if param.dtype == "f32" else np.int64)


def _evaluate(formula: Formula, names: Mapping[str, Any], load: Callable[[str, list[Any]], Array]) -> Any:
    values = {**names, **{c.name: c.value for c in formula.constants}}

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return number
            case ast.Name(id="True" | "False" as word):
                return word == "True"
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp(left, op, right):
                return BINARY[type(op)](value(left), value(right))
            case ast.UnaryOp(op, operand):
                return UNARY[type(op)](value(operand))
            case ast.BoolOp(op, parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return _fold(join, [value(part) for part in parts])
            case ast.Compare(left, ops, rights):
                sides = [value(left), *map(value, rights)]
                return _fold(
                    np.logical_and,
                    [COMPARE[type(op)](a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False)],
                )
            case ast.Call(func=ast.Name(id=name), args=args) if name in FUNCTIONS:
                return FUNCTIONS[name](*map(value, args))
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=parts)):
                return load(name, [value(part) for part in parts])
            case ast.Subscript(value=ast.Name(id=name), slice=part):
                return load(name, [value(part)])
        raise ArgumentError(f"{formula.text!r}: {ast.unparse(node)} has no meaning here")

    with np.errstate(all="ignore"):
        return value(ast.parse(formula.text, mode="eval").body)


def _fold(join: Callable[..., Any], parts: Any) -> Any:
    found = parts[0]
    for part in parts[1:]:
        found = join(found, part)
    return found
