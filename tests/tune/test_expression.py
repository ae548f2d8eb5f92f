"""Constraint expressions: what they mean, and that nothing outside the grammar is evaluated."""

from __future__ import annotations

import pytest

from kvgen.targets import TARGETS
from kvgen.tune.expression import ExpressionError, holds
from kvgen.tune.space import load_space, spec_facts
from tests.support.specs import covering_specs


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("tile % page == 0 or page % tile == 0", True),
        ("tile > 32 and page > 1", False),
        ("not (arch == 'avx2')", False),
        ("1 < page <= 16", True),
        ("tile * 2 - 1 == 63 and 7 // 2 == 3", True),
    ],
)
def test_meaning(text: str, answer: bool) -> None:
    assert holds(text, {"tile": 32, "page": 16, "arch": "avx2"}) is answer


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("__import__('os')", 1),
        ("tile.real", 1),
        ("[t for t in x]", 1),
        ("1 + lambda: 0", 5),
        ("tile ** 9", 1),
    ],
)
def test_nothing_else_is_evaluated(text: str, column: int) -> None:
    with pytest.raises(ExpressionError, match=f"column {column}"):
        holds(text, {"tile": 1})


def test_unknown_names_are_listed() -> None:
    with pytest.raises(ExpressionError, match="no 'tyle' among page, tile"):
        holds("tyle == 1", {"tile": 1, "page": 2})


@pytest.mark.parametrize(
    "template", ["cpp/decode", "cpp/prefill", "cpp/append", "cpp/merge", "cpp/copy", "cpp/gather"]
)
def test_defaults_are_allowed_and_candidates_are_distinct(template: str) -> None:
    space = load_space(template)
    for spec in covering_specs(0)[::11]:
        for name in ("cpu-avx512", "cpu-avx2", "cpu-portable"):
            facts = spec_facts(spec, TARGETS[name])
            assert space.allows(space.default(TARGETS[name], facts), facts)
            found = list(space.candidates(facts))
            assert len(found) == len(set(found)) >= 1
