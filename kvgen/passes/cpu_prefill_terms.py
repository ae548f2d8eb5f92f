"""What prefill asks the plan of masks and scores on the CPU.

Each row of a tile sees the keys of an interval. Where intervals do not say all, a mask of the tile is filled
by a loop over its keys, from what is left of the predicate. Scores are changed by such a loop too, or vector
by vector while they are in registers, where the key does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvgen.ir import Spec
from kvgen.ir.expression import Name, Node, Number, Op, names_of, walk
from kvgen.ir.plan import Constant
from kvgen.passes.cpu_range import key_range
from kvgen.passes.cpu_terms import RowValue, Terms, attention_terms, helper_texts, term_words
from kvgen.passes.terms import Masking, masking, scoring

PLACES: Mapping[str, str] = {
    "batch": "u.b",
    "kv_len": "u.kv_len",
    "q_len": "u.q_len",
    "q_row": "u.q_row + query",
    "q_pos": "u.position + query",
    "kv_head": "u.head",
    "head": "u.head * GROUP + member",
}
"""What the loops over the rows of a block call the names of expressions."""

OF_VECTORS = ("+", "-", "*", "/", "neg", "tanh", "sigmoid")
"""Operations whose C++ text means the same where ``score`` is a vector of scores."""


@dataclass(frozen=True)
class LoopText:
    """A mask or a score in a loop over the keys of a tile, for one row of a block."""

    text: str
    """Over ``key``, ``pos``, ``score`` and values of the row."""
    values: tuple[RowValue, ...]
    """What the row knows before it meets a key."""
    uses: frozenset[str]
    """Names of expressions that the values are made of."""
    keyed: bool
    """Whether the text names ``key``."""
    placed: bool
    """Whether the text names ``pos``."""
    by_key: bool
    """Whether it reads a parameter at the key, which only keys of the request have."""

    @property
    def by_query(self) -> bool:
        """Whether the query's number in the unit must be known."""
        return self.placed or bool(self.uses & {"q_row", "q_pos"})

    @property
    def by_head(self) -> bool:
        """Whether rows of one query differ."""
        return "head" in self.uses

    @property
    def reads(self) -> bool:
        """Whether a value reads the arguments of the call."""
        return any("a.param" in value.text for value in self.values)


def term_answers(spec: Spec, *, prefix: bool) -> tuple[tuple[Constant, ...], dict[str, Any]]:
    """Constants and answers of the prefill template that masks, scores and sinks bring.

    ``prefix``: of the part that a cascade's queries share, where masks and the sink are none.
    """
    att, seen, scores = spec.attention, masking(spec, prefix=prefix), scoring(spec)
    residue = attention_terms(replace(seen, predicate=seen.residue), None, att.params, PLACES)
    changed = attention_terms(replace(seen, predicate=None), scores, att.params, PLACES)
    mask = _loop(residue, residue.predicate, residue.predicate_uses)
    score = _loop(changed, changed.score, changed.score_uses)
    ranges = key_range(seen, att.params)
    vectors = scores is not None and _of_vectors(scores.node)
    constants = {c.name: c for c in (*seen.constants, *changed.constants)}
    uses = (mask.uses if mask else frozenset()) | (score.uses if score else frozenset())
    return tuple(constants.values()), {
        "words": term_words(att, seen, scores),
        "range": ranges,
        # Bounds that parameters give may cross.
        "in_order": not ranges.reads and _in_order(seen),
        "predicate": mask is not None,
        "never_full": mask is not None and seen.never_full,
        "mask": mask,
        "score": None if vectors else score,
        "vector_score": score if vectors else None,
        "vector_helpers": sorted(changed.loop_helpers & {"tanh_", "sigmoid_"}) if vectors else [],
        "sink": att.sink and not prefix,
        "term_helpers": helper_texts(
            residue.helpers, changed.row_helpers if vectors else changed.helpers, ranges.helpers
        ),
        "unit_uses": {
            "args": ranges.reads or any(t and t.reads for t in (mask, score)),
            "b": ranges.reads or "batch" in uses,
            "q_row": "q_row" in uses,
            "q_len": ranges.q_len or ranges.full_q_len or "q_len" in uses,
            "first": any(t and t.keyed for t in (mask, score)),
        },
    }


def _loop(terms: Terms, text: str, names: frozenset[str]) -> LoopText | None:
    if not text:
        return None
    by_key = any("*" in value.type for value in terms.values)
    return LoopText(text, terms.values, terms.uses, "key" in names, "pos" in names, by_key)


def _of_vectors(node: Node) -> bool:
    """Whether the text of a score may read ``score`` as a vector."""
    parts = [part for part in walk(node) if isinstance(part, Op) and "score" in names_of(part)]
    names = names_of(node)
    return "score" in names and "kv_pos" not in names and all(part.op in OF_VECTORS for part in parts)


def _in_order(seen: Masking) -> bool:
    """Whether rows of later queries surely begin and end later."""
    return all(node is None or _grows(node, seen) for node in (seen.lo, seen.hi))


def _grows(node: Node, seen: Masking) -> bool:
    """Whether a bound surely never falls from one position to the next."""
    if not names_of(node) & {"pos_first", "pos_last"}:
        return True
    if isinstance(node, Name):
        return True
    if not isinstance(node, Op):
        return False
    grows = [_grows(arg, seen) for arg in node.args]
    if node.op in ("+", "min", "max"):
        return all(grows)
    if node.op == "-":
        return grows[0] and not names_of(node.args[1]) & {"pos_first", "pos_last"}
    if node.op == "//":
        return grows[0] and _positive(node.args[1], seen)
    if node.op == "*":
        pairs = (node.args, node.args[::-1])
        return any(_grows(factor, seen) and _positive(other, seen) for factor, other in pairs)
    return False


def _positive(node: Node, seen: Masking) -> bool:
    if isinstance(node, Number):
        return node.value > 0
    return isinstance(node, Name) and any(c.name == node.name and c.value > 0 for c in seen.constants)
