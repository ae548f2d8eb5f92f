"""Expressions for tests: a third evaluator (plain Python numbers), and random typed trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvgen.ir import Param
from kvgen.ir.expression import Load, Name, Node, Number, Op, Truth
from kvgen.passes.parse import parse

NAMES = {
    "score": "float",
    **dict.fromkeys(("q_pos", "kv_pos", "q_row", "head", "batch", "kv_len", "q_len"), "int"),
    **dict.fromkeys(("WINDOW", "CHUNK"), "int"),
}
PARAMS = {
    "slope": Param("slope", ("head",), "f32"),
    "lead": Param("lead", ("batch",), "i32"),
    "tree": Param("tree", ("q",), "i64"),
    "shown": Param("shown", ("q", "kv"), "bits"),
    "doc": Param("doc", ("batch", "kv"), "i32"),
}


def read(text: str) -> Node:
    """``text`` over ``NAMES`` and ``PARAMS``."""
    return parse(text, NAMES, PARAMS)


def evaluate(node: Node, values: Mapping[str, Any]) -> Any:
    """The value of ``node``: Python integers, bools and 64-bit floats. Loads are looked up by name
    alone, or called with their last index where what is found can be."""
    if isinstance(node, Number | Truth):
        return node.value
    if isinstance(node, Name):
        return values[node.name]
    if isinstance(node, Load):
        found = values[node.param]
        found = found(evaluate(node.index[-1], values)) if callable(found) else found
        return bool(found) if node.type == "bool" else found
    args = [evaluate(arg, values) for arg in node.args]
    if node.type == "float" and node.op not in ("float", "where"):
        args = [float(arg) for arg in args]
    result = MEANING[node.op](*args)
    return float(result) if node.type == "float" else result


def _guarded(function: Callable[[float], float], x: float, past: float = math.inf) -> float:
    try:
        return function(x)
    except OverflowError:
        return past
    except ValueError:
        return math.nan


def _divide(a: float, b: float) -> float:
    return a / b if b else a * math.inf


MEANING: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "//": lambda a, b: a // b if b else 0,
    "%": lambda a, b: a % b if b else 0,
    "neg": lambda a: -a,
    "abs": abs,
    "min": lambda a, b: b if b < a else a,
    "max": lambda a, b: b if a < b else a,
    "where": lambda c, a, b: a if c else b,
    "exp": lambda x: _guarded(math.exp, x),
    "exp2": lambda x: _guarded(math.exp2, x),
    "log": lambda x: -math.inf if x == 0 else _guarded(math.log, x),
    "log2": lambda x: -math.inf if x == 0 else _guarded(math.log2, x),
    "sqrt": lambda x: _guarded(math.sqrt, x),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + _guarded(math.exp, -x)),
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": lambda a, b: _signed(a << b) if 0 <= b < 64 else 0,
    ">>": lambda a, b: a >> (b if 0 <= b < 64 else 63),
    "int": int,
    "float": float,
}


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


Choose = Callable[[Sequence[Any]], Any]


def random_int(choose: Choose, depth: int) -> Node:
    """An integer over positions, a length, a constant and a parameter; small enough for 32 bits."""
    kinds = (
        ["name", "number"] if depth == 0 else ["name", "+", "-", "*", "//", "%", "abs", "min", "neg", "where"]
    )
    kind = choose(kinds)
    if kind == "name":
        name = choose(["kv_pos", "q_pos", "kv_pos", "q_pos", "kv_len", "WINDOW", "lead"])
        return Load("lead", (Name("batch"),), "int") if name == "lead" else Name(name)
    if kind == "number":
        return Number(choose([-7, -1, 0, 1, 2, 3, 5]))
    left = random_int(choose, depth - 1)
    if kind in ("abs", "neg"):
        return Op(kind, (left,))
    if kind in ("//", "%"):
        return Op(kind, (left, choose([Number(1), Number(3), Number(4), Name("CHUNK")])))
    if kind == "*":
        return Op(kind, (left, Number(choose([-2, -1, 0, 1, 3]))))
    right = random_int(choose, depth - 1)
    if kind == "min":
        return Op(choose(["min", "max"]), (left, right))
    if kind == "where":
        return Op("where", (random_predicate(choose, depth - 1), left, right))
    return Op(kind, (left, right))


def random_predicate(choose: Choose, depth: int) -> Node:
    """A bool over random integers."""
    kind = choose(["compare", "compare", "and", "or", "not", "where"] if depth else ["compare"])
    if kind == "compare":
        sign = choose(["<", "<=", ">", ">=", "==", "!="])
        inner = min(depth, 2)
        return Op(sign, (random_int(choose, inner), random_int(choose, inner)))
    parts = [random_predicate(choose, depth - 1) for _ in range({"not": 1, "where": 3}.get(kind, 2))]
    return Op(kind, tuple(parts))


def random_float(choose: Choose, depth: int) -> Node:
    """A float over a score, a slope and integers."""
    kinds = ["score", "slope", "number", "int"]
    kinds += ["+", "-", "*", "/", "neg", "max", "where", "tanh", "abs"] * bool(depth)
    kind = choose(kinds)
    if kind == "score":
        return Name("score")
    if kind == "slope":
        return Load("slope", (Name("head"),))
    if kind == "number":
        return Number(choose([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]))
    if kind == "int":
        return Op("float", (random_int(choose, min(depth, 1)),))
    left = random_float(choose, depth - 1)
    if kind in ("neg", "tanh", "abs"):
        return Op(kind, (left,))
    right = random_float(choose, depth - 1)
    if kind == "where":
        return Op("where", (random_predicate(choose, 1), left, right))
    return Op(choose(["min", "max"]) if kind == "max" else kind, (left, right))
