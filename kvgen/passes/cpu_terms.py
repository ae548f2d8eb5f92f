"""Masks and scores as C++ text: what a row of queries knows once, and what is left for each key.

Everything that does not depend on the key (slopes, documents, rows of a boolean mask) is a value of the query
row, computed once; the loops over keys read it as ``row_<name>`` and know ``key``, ``pos`` and ``score``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count

from kvgen.ir import AttentionSpec, Param
from kvgen.ir.expression import (
    Load,
    Name,
    Node,
    Number,
    Op,
    Truth,
    children,
    names_of,
    params_of,
    rebuilt,
    walk,
)
from kvgen.ir.plan import Constant
from kvgen.passes.cpu_loads import STORED, element, offset, printed, read_text
from kvgen.passes.print_helpers import HELPERS
from kvgen.passes.print_terms import helpers
from kvgen.passes.terms import Masking, Scoring

IN_LOOP: Mapping[str, str] = {"score": "score", "kv_pos": "key", "q_pos": "pos"}
"""What a loop over keys calls the names that change in it, or that it has at hand anyway."""

_TYPES = {"int": "int64_t", "float": "float", "bool": "bool"}
VECTORISED = ("tanh_",)
"""Helpers in whose loops compilers would find a call; ``cpp/_terms.jinja`` has them without."""

_CHEAP = ("+", "-", "neg")


@dataclass(frozen=True)
class RowValue:
    """What a query row knows before it meets a key."""

    name: str
    type: str
    text: str
    """From the places of a row that the caller names."""
    uses: frozenset[str]
    """Names of expressions that the text holds."""


@dataclass(frozen=True)
class Terms:
    """Masks and scores of an attention kernel."""

    predicate: str
    """Whether the row sees ``key``; empty where intervals say all."""
    score: str
    """What becomes of ``score`` (base-2 units); empty where nothing does."""
    values: tuple[RowValue, ...]
    """In the order in which they are computed."""
    predicate_uses: frozenset[str]
    """What of ``key`` and ``pos`` the predicate names."""
    score_uses: frozenset[str]
    """And the score."""
    constants: tuple[Constant, ...]
    loop_helpers: frozenset[str]
    """Names in ``HELPERS`` of what the predicate and the score call."""
    row_helpers: frozenset[str]
    """And the values of a row."""

    @property
    def helpers(self) -> frozenset[str]:
        """All of them."""
        return self.loop_helpers | self.row_helpers

    @property
    def keyed(self) -> bool:
        """Whether the positions of keys must be known."""
        return "key" in self.predicate_uses | self.score_uses

    @property
    def placed(self) -> bool:
        """Whether the position of the row must be known."""
        return "pos" in self.predicate_uses | self.score_uses

    @property
    def uses(self) -> frozenset[str]:
        """What the values of a row are made of."""
        return frozenset[str]().union(*(value.uses for value in self.values))


def attention_terms(
    masking: Masking, scoring: Scoring | None, params: Iterable[Param], places: Mapping[str, str]
) -> Terms:
    """The texts of a kernel. ``places``: what it calls the names of a row where its values are computed."""
    lifting = _Lifting({param.name: param for param in params}, places)
    predicate = lifting.text(masking.predicate) if masking.predicate is not None else ""
    seen = len(lifting.loop_names)
    score = lifting.text(scoring.node) if scoring else ""
    constants = (*masking.constants, *(scoring.constants if scoring else ()))
    return Terms(
        predicate,
        score,
        tuple(lifting.values.values()),
        frozenset(lifting.loop_names[:seen]),
        frozenset(lifting.loop_names[seen:]),
        tuple({constant.name: constant for constant in constants}.values()),
        frozenset(lifting.loop_helpers),
        frozenset(lifting.row_helpers),
    )


def helper_texts(*names: frozenset[str]) -> list[tuple[str, str]]:
    """Name and definition of helpers; an empty text for those that ``cpp/_terms.jinja`` defines, in loops of
    which compilers make vectors."""
    wanted = frozenset[str]().union(*names)
    return [(name, "" if name in VECTORISED else HELPERS[name].cpp) for name in HELPERS if name in wanted]


def term_words(att: AttentionSpec, masking: Masking, scoring: Scoring | None) -> tuple[str, ...]:
    """What the header of a source says of masks and scores; nothing of plain causal attention."""
    words = (*masking.words, *(scoring.words if scoring else ()), *(["a sink for each head"] * att.sink))
    return words if att.options or att.window is not None else ()


class _Lifting:
    """Takes what no key changes out of expressions, and prints what is left."""

    def __init__(self, params: Mapping[str, Param], places: Mapping[str, str]) -> None:
        self.params, self.places = params, places
        self.values: dict[object, RowValue] = {}
        self.loop_names: list[str] = []
        self.loop_helpers: set[str] = set()
        self.row_helpers: set[str] = set()

    def text(self, node: Node) -> str:
        """An expression in the loop over keys."""
        names: dict[str, str] = {}
        lifted = self._lifted(node, names)
        self.loop_helpers |= set(helpers(lifted))
        self.loop_names += [IN_LOOP[name] for name in sorted(names_of(lifted) & IN_LOOP.keys())]
        return printed(lifted, {**IN_LOOP, **names}, self._keyed_load)

    def _lifted(self, node: Node, names: dict[str, str]) -> Node:
        """The same over names of row values; loads at the key stay."""
        if not _depends(node) and not self._at_hand(node):
            value = self._value(node)
            names[value.name] = f"row_{value.name}"
            return Name(value.name, node.type)
        if isinstance(node, Load):
            return node
        return rebuilt(node, tuple(self._lifted(child, names) for child in children(node)))

    def _at_hand(self, node: Node) -> bool:
        """Whether the loop computes it as cheaply as it would read it."""
        if isinstance(node, Number | Truth):
            return True
        if isinstance(node, Name):
            return node.name == "q_pos" or node.name.isupper()
        return isinstance(node, Op) and node.op in _CHEAP and all(self._at_hand(arg) for arg in node.args)

    def _value(self, node: Node) -> RowValue:
        """What the row computes once for ``node``."""
        self.row_helpers |= set(helpers(node))
        return self._lift(node, _title(node), _TYPES[node.type], self._place(node), names_of(node))

    def _element(self, load: Load) -> str:
        """A load where the row's values are computed."""
        return element(self.params[load.param], load, self._place)

    def _place(self, node: Node) -> str:
        """An expression there."""
        return printed(node, self.places, self._element)

    def _keyed_load(self, load: Load) -> str:
        """A load at the key, from a pointer to the row's own part of the parameter."""
        param = self.params[load.param]
        fixed = tuple((dim, node) for dim, node in zip(param.dims, load.index, strict=True) if dim != "kv")
        uses = frozenset[str]().union(*(names_of(node) for _, node in fixed))
        parts = [offset(param, dim, self._place(node)) for dim, node in fixed]
        base = " + ".join([f"a.param_{param.name}", *parts])
        pointer = self._lift(
            ("pointer", load), f"{param.name}_at", f"const {STORED[param.dtype]}*", base, uses
        )
        key = IN_LOOP["kv_pos"]
        if param.dims[-1] != "kv":
            step = f"a.param_{param.name}_stride_kv"
            key += " * row_" + self._lift(("step", param.name), f"{param.name}_step", "int64_t", step).name
        self.loop_names.append(IN_LOOP["kv_pos"])
        return read_text(param.dtype, f"row_{pointer.name}", key)

    def _lift(
        self, key: object, name: str, kind: str, text: str, uses: frozenset[str] = frozenset()
    ) -> RowValue:
        if key not in self.values:
            taken = {value.name for value in self.values.values()}
            free = next(n for n in chain((name,), (f"{name}_{i}" for i in count(2))) if n not in taken)
            self.values[key] = RowValue(free, kind, text, uses)
        return self.values[key]


def _depends(node: Node) -> bool:
    """Whether a node changes from key to key."""
    return any(isinstance(part, Name) and part.name in ("score", "kv_pos") for part in walk(node))


def _title(node: Node) -> str:
    """A name for a value: the only parameter that it reads, or what it is made of."""
    found = params_of(node) or tuple(sorted(name for name in names_of(node) if not name.isupper()))
    if isinstance(node, Name) or (isinstance(node, Load) and len(found) == 1):
        return found[0]
    return "of_" + "_".join(found)
