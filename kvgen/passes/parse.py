"""Parse the text of a mask or a score into typed nodes.

Python's grammar (``ast.parse``), of which a small part is meant and the rest refused with its column: nothing
is ever evaluated, looked up or imported. Length, depth and size are bounded before anything walks the tree.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvgen.ir.expression import LOADED, REAL, Load, Name, Node, Number, Op, Truth, children
from kvgen.names import FUNCTION, INDEX, suggest

if TYPE_CHECKING:
    from kvgen.ir.attention import Param

LONGEST_TEXT = 2000
DEEPEST = 40
MOST_NODES = 600
LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = 3.4028234e38

FUNCTIONS = {**dict.fromkeys((*REAL, "abs", "float", "int"), 1), "where": 3, "min": 2, "max": 2}
"""Functions by number of arguments (``min`` and ``max``: at least that many)."""
DIM_INDEX = {
    "batch": ("batch",),
    "head": ("head",),
    "q": ("q_row",),
    "kv": ("kv_pos", "q_pos", "pos_first", "pos_last"),
}
"""What may stand in the place of each dim, where the text may use it at all."""

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_OF_BOOLS = {"&": "and", "|": "or", "^": "!="}
_WORDS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Attribute: ("a value has no attributes", ""),
    ast.Lambda: ("lambda is not part of the language", ""),
    ast.ListComp: ("a comprehension is not part of the language", ""),
    ast.SetComp: ("a comprehension is not part of the language", ""),
    ast.DictComp: ("a comprehension is not part of the language", ""),
    ast.GeneratorExp: ("a comprehension is not part of the language", ""),
    ast.JoinedStr: ("an f-string is not part of the language", ""),
    ast.NamedExpr: ("':=' is not part of the language", ""),
    ast.IfExp: ("'a if c else b' is not part of the language", "write where(c, a, b)"),
    ast.Tuple: ("a comma belongs into a call or an index only", ""),
    ast.Starred: ("'*' before a value is not part of the language", ""),
    ast.Slice: ("an index is one value, not a range", ""),
}


class ExpressionError(ValueError):
    """A text that is not an expression of the language."""

    def __init__(self, column: int, reason: str, hint: str = "") -> None:
        self.column = column
        """Where, counted from 1."""
        self.reason = reason
        """What is wrong."""
        self.hint = hint
        """What would work, or empty."""
        super().__init__(f"column {column}: {reason}" + (f" ({hint})" if hint else ""))


def parse(
    text: str, names: Mapping[str, str], params: Mapping[str, Param], *, want: str | None = None
) -> Node:
    """The typed tree of ``text``.

    ``names`` gives the type (``bool``, ``int``, ``float``) of every name that may appear; ``params`` the
    parameters that may be indexed. ``want`` is the type the whole must have (an int becomes a float where one
    is wanted). Raises `ExpressionError` for everything else, in bounded time.
    """
    _check_params(names, params)
    tree, shift = _syntax(text)
    node = _Reader(names, params, shift).read(tree, 0)
    size, height = _extent(node)
    if size > MOST_NODES or height > 2 * DEEPEST:
        raise ExpressionError(
            1, f"the expression has more than {MOST_NODES} parts, or {2 * DEEPEST} in a row"
        )
    if want == "float" and node.type == "int":
        return Op("float", (node,))
    if want is not None and node.type != want:
        hint = "compare something, as in kv_pos <= q_pos" if want == "bool" else ""
        raise ExpressionError(1, f"the expression must be a {want}, and is a {node.type}", hint)
    return node


def _check_params(names: Mapping[str, str], params: Mapping[str, Param]) -> None:
    for name in params:
        if name in names or name in FUNCTIONS:
            what = "name" if name in names else "function"
            raise ExpressionError(1, f"the parameter {name!r} has the name of a {what}", "rename it")


def _syntax(text: str) -> tuple[ast.expr, int]:
    """Python's tree, and how many columns were cut off in front of it."""
    if len(text) > LONGEST_TEXT:
        raise ExpressionError(LONGEST_TEXT + 1, f"the text is longer than {LONGEST_TEXT} characters")
    if odd := re.search(r"[^ -~\t\r\n]|[\\#]", text):
        raise ExpressionError(odd.start() + 1, f"the character {odd.group()!a} has no meaning here")
    line = re.sub(r"\s", " ", text)
    shift = len(line) - len(line.lstrip())
    if not line.strip():
        raise ExpressionError(1, "the expression is empty")
    try:
        return ast.parse(line.strip(), mode="eval").body, shift
    except SyntaxError as error:
        column = (error.offset or len(line.strip()) + 1) + shift  # none is given at the end of the text
        raise ExpressionError(min(column, len(text) + 1), error.msg or "invalid syntax") from None
    except (RecursionError, MemoryError):
        raise ExpressionError(1, "the expression is nested too deeply") from None


def _extent(node: Node) -> tuple[int, int]:
    """Nodes and height of the tree. Chained comparisons share their middles, so a small text can stand for a
    tree that is too large to walk: each shared node is walked once only."""
    known: dict[int, tuple[int, int]] = {}
    todo = [node]
    while todo:
        top = todo[-1]
        missing = [child for child in children(top) if id(child) not in known]
        if missing:
            todo += missing
        else:
            below = [known[id(child)] for child in children(top)]
            known[id(todo.pop())] = (
                1 + sum(size for size, _ in below),
                1 + max((height for _, height in below), default=0),
            )
    return known[id(node)]


class _Reader:
    """Turns Python's nodes into ours."""

    def __init__(self, names: Mapping[str, str], params: Mapping[str, Param], shift: int) -> None:
        self.names, self.params, self.shift = names, params, shift

    def error(self, at: ast.AST, reason: str, hint: str = "") -> ExpressionError:
        return ExpressionError(getattr(at, "col_offset", 0) + 1 + self.shift, reason, hint)

    def build(self, at: ast.AST, op: str, *args: Node) -> Node:
        try:
            return Op(op, args)
        except TypeError as error:
            hint = "write where(condition, 1, 0) for a bool as a number" if "not bool" in str(error) else ""
            raise self.error(at, str(error), hint) from None

    def read(self, tree: ast.expr, depth: int) -> Node:
        if depth > DEEPEST:
            raise self.error(tree, f"the expression is nested deeper than {DEEPEST}")
        depth += 1
        if isinstance(tree, ast.Constant):
            return self.constant(tree)
        if isinstance(tree, ast.Name):
            return self.name(tree)
        if isinstance(tree, ast.UnaryOp):
            return self.unary(tree, depth)
        if isinstance(tree, ast.BinOp):
            return self.binary(tree, depth)
        if isinstance(tree, ast.BoolOp):
            op = "and" if isinstance(tree.op, ast.And) else "or"
            return self.folded(tree, op, [self.read(value, depth) for value in tree.values])
        if isinstance(tree, ast.Compare):
            return self.compare(tree, depth)
        if isinstance(tree, ast.Call):
            return self.call(tree, depth)
        if isinstance(tree, ast.Subscript):
            return self.load(tree)
        reason, hint = _WORDS.get(type(tree), (f"{type(tree).__name__} is not part of the language", ""))
        raise self.error(tree, reason, hint)

    def folded(self, at: ast.AST, op: str, values: list[Node]) -> Node:
        """``op`` from left to right over two or more values."""
        node = values[0]
        for value in values[1:]:
            node = self.build(at, op, node, value)
        return node

    def constant(self, tree: ast.Constant) -> Node:
        value = tree.value
        if isinstance(value, bool):
            return Truth(value)
        if isinstance(value, int):
            if value > LARGEST_INT:
                raise self.error(tree, "the number does not fit into 64 bits")
            return Number(value)
        if isinstance(value, float):
            if not math.isfinite(value) or value > LARGEST_FLOAT:
                raise self.error(tree, "the number does not fit into a 32-bit float")
            return Number(value)
        what = {str: "a string", bytes: "a string", complex: "a complex number"}.get(type(value), repr(value))
        raise self.error(tree, f"{what} is not part of the language")

    def name(self, tree: ast.Name) -> Node:
        if tree.id in self.names:
            return Name(tree.id, self.names[tree.id])
        if tree.id in self.params:
            dims = self.params[tree.id].dims
            if not dims:
                return Load(tree.id, (), LOADED[self.params[tree.id].dtype])
            raise self.error(tree, f"{tree.id} is a parameter", f"write {_indexed(tree.id, dims)}")
        if tree.id in FUNCTIONS:
            raise self.error(tree, f"{tree.id} is a function", f"write {tree.id}(...)")
        raise self.error(tree, f"nothing is called {tree.id!r}", self.nearest(tree.id))

    def nearest(self, name: str) -> str:
        """Hint: the known name that is meant by ``name``, or all of them."""
        if meant := suggest(name, [*self.names, *self.params, *FUNCTIONS], INDEX):
            return f"did you mean {meant}?"
        return "known: " + ", ".join([*self.names, *self.params])

    def unary(self, tree: ast.UnaryOp, depth: int) -> Node:
        value = self.read(tree.operand, depth)
        if isinstance(tree.op, ast.Not):
            return self.build(tree, "not", value)
        if isinstance(tree.op, ast.Invert):
            if value.type == "bool":
                return Op("not", (value,))
            raise self.error(tree, f"'~' takes bool, not {value.type}", "write -x - 1")
        if isinstance(tree.op, ast.USub):
            if isinstance(value, Number):
                return Number(-value.value)
            return self.build(tree, "neg", value)
        self.build(tree, "neg", value)
        return value

    def binary(self, tree: ast.BinOp, depth: int) -> Node:
        if type(tree.op) not in _BINARY:
            word = {ast.Pow: "'**'", ast.MatMult: "'@'"}.get(type(tree.op), "this operator")
            hint = "write x * x, or exp2(x) for 2 ** x" if isinstance(tree.op, ast.Pow) else ""
            raise self.error(tree, f"{word} is not part of the language", hint)
        op = _BINARY[type(tree.op)]
        left, right = self.read(tree.left, depth), self.read(tree.right, depth)
        if op in _OF_BOOLS and left.type == right.type == "bool":
            op = _OF_BOOLS[op]
        if op in ("/", "//", "%") and isinstance(right, Number):
            if right.value == 0:
                raise self.error(tree.right, "division by zero")
            if op != "/" and right.value < 0:
                raise self.error(tree.right, f"the right side of {op} is negative", "divide by 1 or more")
        return self.build(tree, op, left, right)

    def compare(self, tree: ast.Compare, depth: int) -> Node:
        left = self.read(tree.left, depth)
        tests: list[Node] = []
        for sign, right_tree in zip(tree.ops, tree.comparators, strict=True):
            if type(sign) not in _COMPARE:
                word = "'in'" if isinstance(sign, ast.In | ast.NotIn) else "'is'"
                raise self.error(tree, f"{word} is not part of the language", "compare with < <= > >= == !=")
            right = self.read(right_tree, depth)
            tests.append(self.build(tree, _COMPARE[type(sign)], left, right))
            left = right
        return self.folded(tree, "and", tests)

    def call(self, tree: ast.Call, depth: int) -> Node:
        if not isinstance(tree.func, ast.Name):
            self.read(tree.func, depth)
            raise self.error(tree, "only functions can be called", "known: " + ", ".join(FUNCTIONS))
        name = tree.func.id
        if name not in FUNCTIONS:
            if name in self.names or name in self.params:
                raise self.error(tree, f"{name} is not a function")
            meant = suggest(name, FUNCTIONS, FUNCTION)
            hint = f"did you mean {meant}?" if meant else "known: " + ", ".join(FUNCTIONS)
            raise self.error(tree, f"no function is called {name!r}", hint)
        if tree.keywords:
            raise self.error(tree.keywords[0], f"{name} takes no keywords")
        given, wanted = len(tree.args), FUNCTIONS[name]
        if given != wanted and not (name in ("min", "max") and given > wanted):
            more = " or more" if name in ("min", "max") else ""
            plural = "" if wanted == 1 else "s"
            raise self.error(tree, f"{name} takes {wanted}{more} argument{plural}, not {given}")
        args = [self.read(arg, depth) for arg in tree.args]
        return self.folded(tree, name, args) if name in ("min", "max") else self.build(tree, name, *args)

    def load(self, tree: ast.Subscript) -> Node:
        if not isinstance(tree.value, ast.Name) or tree.value.id not in self.params:
            if isinstance(tree.value, ast.Name) and tree.value.id not in self.names:
                meant = suggest(tree.value.id, self.params)
                hint = f"did you mean {meant}?" if meant else "declare it under [attention.params]"
                raise self.error(tree, f"no parameter is called {tree.value.id!r}", hint)
            raise self.error(tree, "only parameters can be indexed", "known: " + ", ".join(self.params))
        name = tree.value.id
        param = self.params[name]
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        if len(parts) != len(param.dims):
            plural = "index" if len(param.dims) == 1 else "indices"
            reason = f"{name} takes {len(param.dims)} {plural}, not {len(parts)}"
            raise self.error(tree, reason, f"write {_indexed(name, param.dims)}")
        index = tuple(self.index(name, param, place, part) for place, part in enumerate(parts))
        return Load(name, index, LOADED[param.dtype])

    def index(self, name: str, param: Param, place: int, tree: ast.expr) -> Node:
        allowed = tuple(word for word in DIM_INDEX[param.dims[place]] if word in self.names)
        if not isinstance(tree, ast.Name) or tree.id not in allowed:
            reason = f"dim {param.dims[place]!r} of {name} is indexed by {' or '.join(allowed)}"
            hint = f"write {_indexed(name, param.dims)}"
            if not isinstance(tree, ast.Name):
                reason += ", and by nothing that is calculated"
                dims = [*(dim for dim in param.dims if dim != "kv"), *(["q"] * ("q" not in param.dims)), "kv"]
                if "kv" in param.dims and "q_row" in self.names:
                    hint = f"give it dims {dims} and write {_indexed(name, tuple(dims))}".replace("'", '"')
            raise self.error(tree, reason, hint)
        return Name(tree.id, self.names[tree.id])


def _indexed(name: str, dims: tuple[str, ...]) -> str:
    return f"{name}[{', '.join(DIM_INDEX[dim][0] for dim in dims)}]" if dims else name
