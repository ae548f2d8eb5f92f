"""Score terms of one kernel as texts: what happens to a tile of scores before masks and softmax."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir.expression import Name, Node, Number, Op, children, names_of, rebuilt, walk
from kvgen.passes.plan_triton_terms import Printer, TileLoad
from kvgen.passes.terms import Scoring

SCORE = Name("score")


@dataclass(frozen=True)
class Score:
    """Texts over the scores of a tile; what they are multiplied by comes first, once."""

    factor: str
    """Number that joins the scale, as text; empty where there is none."""
    text: str
    """The score; empty where nothing but the factor is left."""
    by_key: bool
    """Whether it differs by key, so that a tile needs its keys."""
    loads: tuple[TileLoad, ...]
    """What it reads in each tile."""


def score_for(scoring: Scoring | None, printer: Printer) -> Score | None:
    """The score terms of one kernel, None without any; ``printer`` collects what they read."""
    if scoring is None:
        return None
    factor, node = _split_factor(printer.rows.settled(scoring.node))
    node = printer.hoisted(node)
    name = f"s_{printer.rows.suffix}T"
    text = "" if node == SCORE else printer.pair(node, name)
    if text and "score" not in names_of(node):  # it may have fewer dimensions than a tile of scores
        text = f"tl.zeros_like({name}) + ({text})"
    by_key = "kv_pos" in names_of(node)
    return Score("" if factor is None else repr(factor), text, by_key, printer.tile_loads([node]))


def _split_factor(node: Node) -> tuple[float | None, Node]:
    """The constant that meets the score first, where the score stands once, and the node without it."""
    if sum(part == SCORE for part in walk(node)) != 1:
        return None, node
    return _without_factor(node)


def _without_factor(node: Node) -> tuple[float | None, Node]:
    if isinstance(node, Op) and node.op == "*" and SCORE in node.args:
        other = node.args[node.args[0] == SCORE]
        if isinstance(other, Number):
            return float(other.value), SCORE
    if not isinstance(node, Op):
        return None, node
    found = [_without_factor(part) for part in children(node)]
    return next((f for f, _ in found if f is not None), None), rebuilt(node, tuple(n for _, n in found))
