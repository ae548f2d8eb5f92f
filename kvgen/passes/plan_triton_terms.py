"""Masks and scores as Triton texts: expressions over the names of one kernel, and loads of what they read.

A value depends on the request (a scalar), the query row ([M], or [H] where rows are folded), the key ([T])
or both ([M, T]). What depends on the request or the row is computed once, before the loops; the rest in each
tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvgen.ir import Param
from kvgen.ir.expression import Load, Name, Node, Number, Op, children, names_of, rebuilt, walk
from kvgen.passes.print_terms import helpers, not_negative, print_triton
from kvgen.passes.simplify import simplify, substitute

ONLY = Op("-", (Name("kv_len"), Number(1)))
"""Position of the only query of a request."""


@dataclass(frozen=True)
class Rows:
    """What a kernel calls its query rows."""

    suffix: str
    """``M``, ``H`` (folded) or ``R`` (rows of the merge)."""
    ragged: bool
    """Several queries a request; else one, at position kv_len - 1."""
    live: str
    """Name of the vector that tells which rows exist; empty where all do."""

    @property
    def varying(self) -> dict[str, str]:
        """Names that differ by row, as vectors."""
        names = {"head": f"head_{self.suffix}"}
        if not self.ragged:
            return names
        if self.suffix == "R":
            return {"pos_first": "pos_R", "pos_last": "pos_R"}
        return names | {"q_pos": f"pos_{self.suffix}", "q_row": f"q_first + token_{self.suffix}"}

    @property
    def fixed(self) -> dict[str, str]:
        """Names that are one number for the request, or for the block of queries."""
        names = {"batch": "b", "kv_head": "head", "kv_len": "kv_len", "q_len": "q_len"}
        return names | ({"pos_first": "first_pos", "pos_last": "last_pos"} if self.ragged else {"q_row": "b"})

    def settled(self, node: Node) -> Node:
        """``node`` with the position of the only query put in."""
        at: dict[str, Node] = dict.fromkeys(("q_pos", "pos_first", "pos_last"), ONLY)
        return node if self.ragged else simplify(substitute(node, at | {"q_len": Number(1)}))


@dataclass(frozen=True)
class TileLoad:
    """Elements of a parameter that every tile loads, by key or by row and key."""

    name: str
    address: str
    value: str
    """What is made of the load, as a format."""
    pair: bool
    """[M, T]; else [T]."""
    live: str
    """Rows that exist; empty where all do, or where rows do not matter."""

    def line(self, masked: bool) -> str:
        """The definition, in a masked tile or in a full one."""
        seen = ("seen_T[None, :]" if self.pair else "seen_T") if masked else ""
        conditions = [c for c in (seen, f"{self.live}[:, None]" if self.live else "") if c]
        mask = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
        return f"{self.name} = {self.value.format(f'tl.load({self.address}{mask})')}"


@dataclass
class Printer:
    """Prints the expressions of one kernel and collects what they need."""

    rows: Rows
    params: dict[str, Param]
    requests: list[str] = field(default_factory=list)
    """Lines that load what depends on the request alone."""
    vectors: list[str] = field(default_factory=list)
    """Lines that load or compute what depends on the row."""
    names: set[str] = field(default_factory=set)
    """Names of the kernel that were printed: it defines only these."""
    read: set[str] = field(default_factory=set)
    """Parameters that were read."""
    helpers: set[str] = field(default_factory=set)
    """Functions that the texts call."""
    _loads: dict[Load, str] = field(default_factory=dict)
    _tiles: dict[Load, TileLoad] = field(default_factory=dict)
    _terms: set[str] = field(default_factory=set)

    def kind(self, node: Node) -> str:
        """What a value depends on: ``request``, ``row``, ``key`` or ``pair``."""
        names = names_of(node)
        row, key = bool(names & (self.rows.varying.keys() | self._terms | {"score"})), "kv_pos" in names
        return ("pair" if key else "row") if row else ("key" if key else "request")

    def vector(self, node: Node) -> str:
        """Text of a value that does not depend on both: a scalar, [M] or [T]."""
        return self._print(node, {"kv_pos": "key_T"} | self.rows.varying, "")

    def pair(self, node: Node, score: str = "") -> str:
        """Text of a value that broadcasts to [M, T]; ``score`` is that of the scores."""
        names = {name: _column(text) for name, text in self.rows.varying.items()}
        names |= {name: f"{name}_{self.rows.suffix}[:, None]" for name in self._terms}
        return self._print(node, names | {"kv_pos": "key_T[None, :]", "score": score}, "pair")

    def hoisted(self, node: Node) -> Node:
        """``node`` with all floats that depend on the row alone computed before the loops."""
        if not isinstance(node, Op):
            return node
        by_row = self.kind(node) == "row" and "score" not in names_of(node)
        if by_row and node.type == "float" and node.op != "neg":
            name = f"term{len(self._terms) or ''}"
            self.vectors.append(f"{name}_{self.rows.suffix} = {self.vector(node)}")
            self._terms.add(name)
            return Name(name, "float")
        return rebuilt(node, tuple(self.hoisted(part) for part in children(node)))

    def tile_loads(self, nodes: Iterable[Node]) -> tuple[TileLoad, ...]:
        """What every tile loads for these expressions, all printed before."""
        loads = (part for node in nodes for part in walk(node) if isinstance(part, Load))
        return tuple(dict.fromkeys(self._tiles[load] for load in loads if load in self._tiles))

    def _print(self, node: Node, names: dict[str, str], shape: str) -> str:
        self.helpers.update(helpers(node))
        self.names.update(names_of(node))
        constants = {name: name for name in names_of(node) if name.isupper()}
        return print_triton(node, constants | self.rows.fixed | names, self._reader(shape))

    def _reader(self, shape: str) -> Callable[[Load], str]:
        def text(load: Load) -> str:
            kind = self.kind(load)
            if load not in self._loads:
                self._loads[load] = self._define(load, kind)
            name = self._loads[load]
            return name + ({"row": "[:, None]", "key": "[None, :]"}.get(kind, "") if shape == "pair" else "")

        return text

    def _define(self, load: Load, kind: str) -> str:
        """Defines an element where it can be loaded at the earliest; its name."""
        param, rows = self.params[load.param], self.rows
        self.read.add(param.name)
        suffix = {"row": rows.suffix, "key": "T", "pair": f"{rows.suffix}T"}.get(kind, _place(load))
        name = f"param_{param.name}_{suffix}"
        address, value, position = self._address(param, load, kind)
        if kind in ("key", "pair"):
            live = rows.live if kind == "pair" else ""
            self._tiles[load] = TileLoad(name, address, value, kind == "pair", live)
            return name
        conditions = [rows.live] if kind == "row" and rows.live else []
        if position:  # a request without keys has none: nothing may lie where its first one would
            conditions.append(f"({position} < kv_len)" if conditions else f"{position} < kv_len")
        mask = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
        line = f"{name} = {value.format(f'tl.load({address}{mask})')}"
        (self.vectors if kind == "row" else self.requests).append(line)
        return name

    def _address(self, param: Param, load: Load, kind: str) -> tuple[str, str, str]:
        """Pointer to an element, what is made of what lies there, as a format, and its position, if it has
        one."""
        terms, value, position = [f"param_{param.name}_ptr"], "{}", ""
        for dim, node in zip(param.dims, load.index, strict=True):
            text = self.pair(node) if kind == "pair" else self.vector(node)
            if dim == "kv" and not not_negative(node):
                text = f"tl.maximum({text}, 0)"
            if dim == "kv":
                position = text
            if dim != param.dims[-1]:
                text = f"({text})" if " + " in text and not text.endswith(("]", ")")) else text
                text += f" * param_{param.name}_stride_{dim}"
            elif param.dtype == "bits":
                value = f"({{}} >> {text} % 8) & 1 != 0"
                text += " // 8"
            terms.append(text)
        return " + ".join(terms), "{} != 0" if param.dtype == "bool" else value, position


def _column(text: str) -> str:
    return f"({text})[:, None]" if " " in text else f"{text}[:, None]"


def _place(load: Load) -> str:
    """End of the name of an element that is one number: which position of the request, or its request."""
    if Name("pos_first") in load.index:
        return "first"
    if Name("pos_last") in load.index or ONLY in load.index:
        return "last"
    return "b" if load.index else "0"
