"""terms: what an attention spec asks of masks and scores, as typed expressions that both backends print.

Which definitions are on, and what they say, comes from ``kvgen.variants``; templates see a predicate, bounds
and a score, and never learn which mask or term it was. sympy is loaded when the first one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

from kvgen.errors import UnsupportedError
from kvgen.ir import AttentionSpec, Param, Spec
from kvgen.ir.expression import Name, Node, Number, Op, names_of, params_of
from kvgen.ir.plan import Constant
from kvgen.passes.parse import parse
from kvgen.variants import Definition, Formula, definitions, switched_on

if TYPE_CHECKING:
    from kvgen.passes.bounds import Bounds

POSITIONS: Mapping[str, str] = dict.fromkeys(
    ("q_pos", "kv_pos", "q_row", "head", "kv_head", "batch", "kv_len", "q_len"), "int"
)
"""Names of a predicate. Positions are logical; ``q_row`` is the row of q in the call."""

PLACED = frozenset({"q_pos", "kv_pos", "kv_len", "q_len", "q_row", "batch"})
"""Those that mean nothing in the shared prefix of a cascade."""

BLOCK: Mapping[str, str] = dict.fromkeys(("pos_first", "pos_last", "batch", "kv_len", "q_len"), "int")
"""Names of a bound: the positions of a block of queries of one request, and what is one for the request."""


@dataclass(frozen=True)
class Masking:
    """Which keys a query sees. A key also lies in [0, kv_len)."""

    predicate: Node | None
    """Whether a row sees a key: all masks; None where every key is seen."""
    residue: Node | None
    """The part of it that the bounds of a single row do not say: with it, a row sees the keys of its own
    [lo, hi) for which this holds. None: all of them."""
    lo: Node | None
    """First key that some row of a block at pos_first .. pos_last sees; None: 0."""
    hi: Node | None
    """One past the last such key; None: kv_len."""
    full_lo: Node | None
    """First key that all rows see; None: 0."""
    full_hi: Node | None
    """One past the last such key; None: kv_len."""
    never_full: bool
    """Whether no key is known to be seen by all rows."""
    constants: tuple[Constant, ...]
    params: tuple[Param, ...]
    words: tuple[str, ...]
    """What is masked, for the header of a source."""

    @property
    def exact(self) -> bool:
        """Whether a single row sees exactly the keys of its own [lo, hi)."""
        return self.residue is None


@dataclass(frozen=True)
class Scoring:
    """What happens to a score before masks and softmax."""

    node: Node
    """Over ``score`` (q.k times ``score_scale``: base-2 units) and ``POSITIONS``; in base-2 units."""
    natural: Node
    """The same in natural units, before anything was folded: for comments."""
    constants: tuple[Constant, ...]
    params: tuple[Param, ...]
    words: tuple[str, ...]


def active(att: AttentionSpec, kind: str = "") -> tuple[tuple[Definition, Formula], ...]:
    """The definitions that a spec switches on, in their order, each with its formula."""
    chosen = ((d, att.option(d.name)) for d in definitions(kind))
    return tuple((d, d.formula(value, att.q_heads)) for d, value in chosen if switched_on(value))


def parsed(kind: str, formula: Formula, params: Iterable[Param]) -> Node:
    """The expression of a mask (bool) or a score (float). Raises ``ExpressionError``."""
    names = dict(POSITIONS) | _types(formula.constants)
    if kind == "score":
        names["score"] = "float"
    return parse(formula.text, names, {p.name: p for p in params}, want="bool" if kind == "mask" else "float")


def prefix_obstacle(spec: Spec) -> str:
    """Why a cascade's queries cannot attend to their shared prefix at once; empty where they can."""
    att = spec.attention
    for definition, formula in active(att):
        if definition.name == "causal" or definition.kind == "sink":
            continue
        placed = definition.kind == "mask"
        if not placed:
            placed = bool(names_of(parsed("score", formula, att.params)) & PLACED)
        if placed:
            return (
                f"attention.{definition.name}: all queries attend to the shared prefix of a cascade at once, "
                "and this reads their positions; use decode or prefill over whole page tables"
            )
    return ""


def masking(spec: Spec, *, single: bool = False, prefix: bool = False) -> Masking:
    """The masks of a spec.

    ``single``: one query a request, at position kv_len - 1. ``prefix``: the shared part of a cascade, whose
    keys all precede the queries; ``UnsupportedError`` where ``prefix_obstacle`` finds one.
    """
    if prefix and (reason := prefix_obstacle(spec)):
        raise UnsupportedError(reason)
    return _masking(spec.attention, single, prefix, definitions())


def scoring(spec: Spec) -> Scoring | None:
    """The score terms of a spec as one expression; None where there are none."""
    return _scoring(spec.attention, definitions())


@lru_cache(maxsize=256)
def _masking(att: AttentionSpec, single: bool, prefix: bool, known: tuple[Definition, ...]) -> Masking:
    from kvgen.passes.bounds import Bounds, both
    from kvgen.passes.simplify import simplify, substitute

    used = () if prefix else active(att, "mask")
    found = Bounds(None, None, None, None, never_full=False, exact=True)
    every: list[Node] = []
    rest: list[Node] = []
    last = Op("-", (Name("kv_len"), Number(1)))
    at: dict[str, Node] = dict.fromkeys(("pos_first", "pos_last", "q_pos"), last)
    at["q_len"] = Number(1)
    for _, formula in used:
        node = parsed("mask", formula, att.params)
        node = substitute(node, at) if single else node  # what then reads no key is a bound
        bounds = _bounds(formula, node, att.params)
        found = both(found, bounds)
        every.append(node)
        if not bounds.exact:
            rest.append(node)
    predicate, residue = _all_of(every), _all_of(rest)
    limits = {"lo": found.lo, "hi": found.hi, "full_lo": found.full_lo, "full_hi": found.full_hi}
    if single:
        limits = {key: None if n is None else substitute(n, at) for key, n in limits.items()}
        predicate, residue = (None if n is None else substitute(n, at) for n in (residue, residue))
    sizes = {c.name: c.value for _, f in used for c in f.constants if isinstance(c.value, int)}
    limits = {key: None if n is None else _needed(key, simplify(n), sizes) for key, n in limits.items()}
    predicate, residue = (None if n is None else simplify(n) for n in (predicate, residue))
    kept = [n for n in (predicate, residue, *limits.values()) if n is not None]
    return Masking(
        predicate=predicate,
        residue=residue,
        **limits,
        never_full=found.never_full,
        constants=_constants([f for _, f in used], kept),
        params=_params(att, kept),
        words=tuple(_word(d, att) for d, _ in used if not (single and d.name == "causal")),
    )


@lru_cache(maxsize=256)
def _scoring(att: AttentionSpec, known: tuple[Definition, ...]) -> Scoring | None:
    from kvgen.passes.simplify import base2, simplify, substitute

    used = active(att, "score")
    if not used:
        return None
    natural: Node = Name("score")
    for _, formula in used:
        node = parsed("score", formula, att.params)
        natural = substitute(node, {"score": natural})
    values: dict[str, Node] = {
        c.name: Number(c.value) for _, f in used for c in f.constants if isinstance(c.value, float)
    }
    # Floats melt into the factors of base 2; integers keep their names.
    node = base2(simplify(substitute(natural, values)))
    return Scoring(
        node=node,
        natural=natural,
        constants=_constants([f for _, f in used], [node]),
        params=_params(att, [node]),
        words=tuple(_word(d, att) for d, _ in used),
    )


def _bounds(formula: Formula, node: Node, params: tuple[Param, ...]) -> Bounds:
    """Bounds of one mask: those that its definition gives, else what its text says."""
    from kvgen.passes.bounds import Bounds, derive

    if not formula.bounds:
        return derive(node)
    names = dict(BLOCK) | _types(formula.constants)
    known = {p.name: p for p in params}
    given = {key: parse(text, names, known, want="int") for key, text in formula.bounds.items()}
    return Bounds(
        given.get("lo"),
        given.get("hi"),
        given.get("full_lo"),
        given.get("full_hi"),
        never_full=not {"full_lo", "full_hi"} & given.keys(),
        exact=False,
    )


def _needed(key: str, node: Node, sizes: Mapping[str, int]) -> Node | None:
    """None for a bound that says nothing beside 0 <= key < kv_len."""
    from kvgen.passes.prove import never_below

    if key.endswith("hi"):
        return None if never_below(node, Name("kv_len"), sizes) else node
    return None if never_below(Number(0), node, sizes) else node


def _all_of(nodes: list[Node]) -> Node | None:
    return reduce(lambda a, b: Op("and", (a, b)), nodes) if nodes else None


def _types(constants: Iterable[Constant]) -> dict[str, str]:
    return {c.name: "float" if isinstance(c.value, float) else "int" for c in constants}


def _constants(formulas: list[Formula], nodes: list[Node]) -> tuple[Constant, ...]:
    read = {name for node in nodes for name in names_of(node)}
    return tuple(c for f in formulas for c in f.constants if c.name in read)


def _params(att: AttentionSpec, nodes: list[Node]) -> tuple[Param, ...]:
    read = {name for node in nodes for name in params_of(node)}
    return tuple(p for p in att.params if p.name in read)


def _word(definition: Definition, att: AttentionSpec) -> str:
    return definition.words.format(name=definition.name, value=att.option(definition.name))
