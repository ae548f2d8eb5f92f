"""Typed expressions: what a mask or a score term says of one (query, key) pair.

A tree of frozen nodes. Every node has a ``type``: ``bool``, ``int`` or ``float``. Meaning is Python's on
exact integers and reals: ``//`` and ``%`` floor, ``/`` of integers is a float, shifts by less than 0 or more
than 63 give 0 (``<<``) or the sign (``>>``), and ``// 0`` and ``% 0`` give 0, as numpy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ARITHMETIC = ("+", "-", "*", "min", "max")
"""Two numbers; a float if either is."""
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
"""Two numbers (the last two also of two bools); a bool."""
BITS = ("&", "|", "^", "<<", ">>")
"""Two ints; an int."""
REAL = ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid")
"""One number; a float."""
ARITY = {
    **dict.fromkeys((*ARITHMETIC, *COMPARISONS, *BITS, "/", "//", "%", "and", "or"), 2),
    **dict.fromkeys((*REAL, "neg", "abs", "not", "float", "int"), 1),
    "where": 3,
}
"""Number of arguments by operation."""


@dataclass(frozen=True)
class Number:
    """A constant: an ``int`` or a ``float``."""

    value: int | float

    @property
    def type(self) -> str:
        """``int`` or ``float``."""
        return "float" if isinstance(self.value, float) else "int"


@dataclass(frozen=True)
class Truth:
    """``True`` or ``False``."""

    value: bool

    @property
    def type(self) -> str:
        """``bool``."""
        return "bool"


@dataclass(frozen=True)
class Name:
    """A value that the kernel knows: ``score``, ``q_pos``, ``WINDOW``..."""

    name: str
    type: str = ""
    """Default: ``float`` for ``score``, ``int`` for all others."""

    def __post_init__(self) -> None:
        if not self.type:
            object.__setattr__(self, "type", "float" if self.name == "score" else "int")


@dataclass(frozen=True)
class Load:
    """An element of a parameter."""

    param: str
    """Name of the parameter."""
    index: tuple[Node, ...]
    """One node for each dim."""
    type: str = "float"
    """What its dtype reads as."""


@dataclass(frozen=True)
class Op:
    """An operation; raises ``TypeError`` for a wrong number or type of arguments."""

    op: str
    """A key of ``ARITY``."""
    args: tuple[Node, ...]
    type: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", result_type(self.op, tuple(arg.type for arg in self.args)))


Node = Number | Truth | Name | Load | Op

LOADED = {"f32": "float", "i32": "int", "i64": "int", "bool": "bool", "bits": "bool"}
"""What an element of a parameter reads as, by dtype."""


def result_type(op: str, types: tuple[str, ...]) -> str:
    """Type of ``op`` over arguments of ``types``; ``TypeError`` says what it wanted."""
    if op not in ARITY:
        raise TypeError(f"no operation is called {op!r}")
    if len(types) != ARITY[op]:
        raise TypeError(f"{op} takes {ARITY[op]} argument{'s' * (ARITY[op] > 1)}, not {len(types)}")
    bools = types.count("bool")
    if op in ("and", "or", "not"):
        return _need(op, types, bools == len(types), "bool", "bool")
    if op in ("==", "!=") and bools == 2:
        return "bool"
    if op == "where":
        _need("the condition of where", types[:1], types[0] == "bool", "bool", "")
        if types[1] == types[2]:
            return types[1]
        return _need("where", types[1:], "bool" not in types[1:], "two numbers or two bools", "float")
    if op in ("float", "int"):
        return op
    if op in ("//", "%", *BITS):
        return _need(op, types, all(kind == "int" for kind in types), "int", "int")
    _need(op, types, bools == 0, "numbers", "")
    if op in COMPARISONS:
        return "bool"
    if op == "/" or op in REAL:
        return "float"
    return "float" if "float" in types else "int"


def _need(what: str, types: tuple[str, ...], fine: bool, wanted: str, result: str) -> str:
    if not fine:
        raise TypeError(f"{what} takes {wanted}, not {' and '.join(types)}")
    return result


def walk(node: Node) -> Iterator[Node]:
    """The node and all nodes below it, parents first, left to right."""
    yield node
    for child in children(node):
        yield from walk(child)


def children(node: Node) -> tuple[Node, ...]:
    """Arguments of an operation, indices of a load; nothing else has any."""
    if isinstance(node, Op):
        return node.args
    return node.index if isinstance(node, Load) else ()


def rebuilt(node: Node, parts: tuple[Node, ...]) -> Node:
    """The same kind of node over other children."""
    if isinstance(node, Op):
        return Op(node.op, parts)
    return Load(node.param, parts, node.type) if isinstance(node, Load) else node


def names_of(node: Node) -> frozenset[str]:
    """Every name that the node reads."""
    return frozenset(part.name for part in walk(node) if isinstance(part, Name))


def params_of(node: Node) -> tuple[str, ...]:
    """Every parameter that the node reads, in order of appearance."""
    return tuple(dict.fromkeys(part.param for part in walk(node) if isinstance(part, Load)))
