"""Print expressions as scalar C++ and as Triton, with the parentheses that the language needs and few others.

C++: ints are ``int64_t``, floats ``float``. ``min`` and ``max`` of floats are ``std::min`` and ``std::max``,
which become one instruction; which of their arguments a NaN gives is not specified. Triton: ints are as wide
as their names; bools combine by ``&``, ``|`` and ``~``.

Both languages truncate divisions: where the left side may be negative, or the right side is not a constant,
a helper divides. ``helpers`` names those that a text calls; their definitions are in ``HELPERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from kvgen.ir.expression import BITS, COMPARISONS, REAL, Load, Name, Node, Number, Op, Truth, walk
from kvgen.passes.print_helpers import HELPERS

NOT_NEGATIVE = frozenset({"kv_pos", "q_row", "head", "kv_head", "batch", "kv_len", "q_len"})
"""Names that are never negative; ``q_pos`` is, where a request has more queries than keys."""

Names = Mapping[str, str]
Loads = Callable[[Load], str]
"""Text of an element of a parameter."""

_ATOM = 20
_CPP = {"or": 1, "and": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, "<=": 7, ">": 7, ">=": 7}
_PYTHON = dict.fromkeys(COMPARISONS, 1) | {"or": 2, "|": 2, "^": 3, "and": 4, "&": 4}
_SHARED = {"<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "//": 10, "%": 10, "neg": 11, "not": 11}
_CHAINS = frozenset({"+", "*", "and", "or", "&", "|", "^"})
"""Operations that need no parentheses around themselves on the right (floats aside)."""
_MIXED = {
    "or": ("and",),
    "<<": ("+", "-"),
    ">>": ("+", "-"),
    "&": (*BITS, "+", "-"),
    "|": (*BITS, "+", "-"),
    "^": (*BITS, "+", "-"),
    **dict.fromkeys(COMPARISONS, (*BITS, *COMPARISONS)),
}
"""Operations whose precedence readers are not sure of, by the operation around them."""


def print_c(node: Node, names: Names, load: Loads) -> str:
    """C++ text of ``node``; ``names`` gives the text of each name, ``load`` that of each element."""
    return _Cpp(names, load).text(node, 0)


def print_triton(node: Node, names: Names, load: Loads) -> str:
    """Triton text of ``node``; ``names`` gives the text of each name, ``load`` that of each element."""
    return _Triton(names, load).text(node, 0)


def helpers(node: Node) -> tuple[str, ...]:
    """Names in ``HELPERS`` that the text of ``node`` calls, in the order of ``HELPERS``."""
    called = {_helper(part) for part in walk(node) if isinstance(part, Op)}
    return tuple(name for name in HELPERS if name in called)


def _helper(node: Op) -> str:
    """The helper that an operation calls, or nothing."""
    if node.op in ("tanh", "sigmoid"):
        return node.op + "_"
    if node.op in ("//", "%"):
        kind = "div" if node.op == "//" else "mod"
        left, right = node.args
        if not (isinstance(right, Number) or (isinstance(right, Name) and right.name.isupper())):
            return f"any_{kind}"
        return "" if not_negative(left) else f"floor_{kind}"
    if node.op in ("<<", ">>"):
        amount = node.args[1]
        if isinstance(amount, Number) and 0 <= amount.value < 32 and not isinstance(node.args[0], Number):
            return ""
        return "shift_left" if node.op == "<<" else "shift_right"
    return ""


def not_negative(node: Node) -> bool:
    """Whether an integer is certainly 0 or more."""
    if isinstance(node, Number):
        return node.value >= 0
    if isinstance(node, Name):
        return node.name in NOT_NEGATIVE
    if not isinstance(node, Op):
        return False
    if node.op in ("+", "*", "min", "|", ">>"):
        return all(not_negative(arg) for arg in node.args)
    if node.op in ("max", "&"):
        return any(not_negative(arg) for arg in node.args)
    if node.op == "where":
        return all(not_negative(arg) for arg in node.args[1:])
    if node.op == "%":
        right = node.args[1]
        return isinstance(right, Number) or (isinstance(right, Name) and right.name.isupper())
    if node.op == "//":
        return not_negative(node.args[0]) and not_negative(node.args[1])
    return node.op == "abs" or (node.op == "int" and node.args[0].type == "bool")


class _Printer:
    """What both languages share: precedence, names, loads."""

    signs: ClassVar[Mapping[str, str]]
    levels: ClassVar[Mapping[str, int]]

    def __init__(self, names: Names, load: Loads) -> None:
        self.names, self.load = names, load

    def text(self, node: Node, level: int, kind: str = "") -> str:
        """``node`` as an operand of an operator of ``level``; ``kind`` is the type its surroundings have."""
        if kind == "float" and node.type == "int":
            node = Number(float(node.value)) if isinstance(node, Number) else self.widened(node)
        if isinstance(node, Number):
            text, own = self.number(node), (_SHARED["neg"] if node.value < 0 else _ATOM)
        elif isinstance(node, Truth):
            text, own = self.truth(node), _ATOM
        elif isinstance(node, Name):
            text = self.names[node.name]
            own = _ATOM if _whole(text) else 0
        elif isinstance(node, Load):
            text = self.load(node)
            own = _ATOM if _whole(text) else 0
        else:
            text, own = self.operation(node)
        return f"({text})" if own < level else text

    def widened(self, node: Node) -> Node:
        """An integer among floats."""
        return Op("float", (node,))

    def operation(self, node: Op) -> tuple[str, int]:
        """Text and level of an operation."""
        op, args = node.op, node.args
        if name := _helper(node):
            kind = "float" if op in REAL else ""
            return f"{name}({', '.join(self.text(arg, 0, kind) for arg in args)})", _ATOM
        if op not in self.levels:
            return self.call(node), _ATOM
        own = self.levels[op]
        if len(args) == 1:
            return self.signs.get(op, op) + self.text(args[0], own + 1), own
        kind = self.operand_type(node)
        left, right = (self.text(arg, self.level_of(node, arg), kind) for arg in args)
        return f"{left} {self.signs.get(op, op)} {right}", own

    def operand_type(self, node: Op) -> str:
        if node.op in COMPARISONS:
            return "float" if "float" in (arg.type for arg in node.args) else ""
        return node.type

    def level_of(self, node: Op, arg: Node) -> int:
        """Level that an operand needs to stand without parentheses."""
        own = self.levels[node.op]
        if not isinstance(arg, Op):
            return own + (arg is node.args[1])
        if arg.op in _MIXED.get(node.op, ()) and arg.op != node.op:
            return _ATOM
        if node.op in COMPARISONS:
            return own + 1
        chains = arg.op == node.op and node.op in _CHAINS and node.type != "float"
        return own + (arg is node.args[1] and not chains)

    def number(self, node: Number) -> str:
        raise NotImplementedError

    def truth(self, node: Truth) -> str:
        raise NotImplementedError

    def call(self, node: Op) -> str:
        """An operation that is neither an operator nor a helper."""
        raise NotImplementedError


class _Cpp(_Printer):
    signs: ClassVar[Mapping[str, str]] = {"//": "/", "and": "&&", "or": "||", "not": "!", "neg": "-"}
    levels: ClassVar[Mapping[str, int]] = {**_CPP, **_SHARED}

    def number(self, node: Number) -> str:
        return f"{node.value!r}f" if node.type == "float" else str(node.value)

    def truth(self, node: Truth) -> str:
        return "true" if node.value else "false"

    def call(self, node: Op) -> str:
        if node.op == "where":
            parts = (self.text(node.args[0], 1), *(self.text(arg, 1, node.type) for arg in node.args[1:]))
            return "({} ? {} : {})".format(*parts)
        kind = "float" if node.type == "float" and node.op not in ("float", "int") else ""
        args = ", ".join(self.text(arg, 0, kind) for arg in node.args)
        if node.op in ("float", "int"):
            return f"{'float' if node.op == 'float' else 'int64_t'}({args})"
        if node.op in ("min", "max"):
            return f"std::{node.op}<{'float' if node.type == 'float' else 'int64_t'}>({args})"
        return f"std::{node.op}({args})"


class _Triton(_Printer):
    """Triton widens integers beside floats by itself, except as the argument of a function."""

    signs: ClassVar[Mapping[str, str]] = {"and": "&", "or": "|", "not": "~", "neg": "-"}
    levels: ClassVar[Mapping[str, int]] = {**_PYTHON, **_SHARED}

    def number(self, node: Number) -> str:
        return repr(node.value)

    def truth(self, node: Truth) -> str:
        return repr(node.value)

    def widened(self, node: Node) -> Node:
        return node

    def call(self, node: Op) -> str:
        kind = node.type if node.type == "float" and node.op not in ("float", "int") else ""
        args = [self.text(arg, 0, kind) for arg in node.args]
        if node.op in REAL and node.args[0].type == "int":
            args = [f"tl.cast({args[0]}, tl.float32)"]
        if node.op in ("float", "int"):
            return f"tl.cast({args[0]}, tl.{'float32' if node.op == 'float' else 'int32'})"
        name = {"min": "minimum", "max": "maximum"}.get(node.op, node.op)
        return f"tl.{name}({', '.join(args)})"


def _whole(text: str) -> bool:
    """Whether a text is a name, call or index, which needs no parentheses anywhere."""
    depth = 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if depth == 0 and char in " +-*/%<>=!&|^~?":
            return False
    return True
