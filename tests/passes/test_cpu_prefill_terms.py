"""What prefill on the CPU is told of masks and scores: intervals or a mask, row order, vectors or a loop."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.passes.cpu_prefill_terms import term_answers
from kvgen.passes.validate import load_spec


def answers(**attention: Any) -> dict[str, Any]:
    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "q_dtype": "bf16"}
    cache = {
        "page_size": 16,
        "layout": "page kv head tok d",
        "k": {"format": "bf16"},
        "v": {"format": "bf16"},
    }
    spec = load_spec({"name": "terms", "attention": {**heads, **attention}, "cache": cache})
    return term_answers(spec, prefix=False)[1]


@pytest.mark.parametrize(
    ("attention", "predicate", "in_order", "never_full"),
    [
        ({}, False, True, False),
        ({"window": 9}, False, True, False),
        ({"chunk": 9}, False, True, False),
        ({"mask": "kv_pos >= 2 * q_pos - 50"}, False, True, False),
        # Bounds that parameters give may cross, and those of a document may fall.
        ({"kv_first": True}, False, False, False),
        ({"document": True}, True, False, False),
        ({"causal": False, "mask": "kv_pos <= 300 - 2 * q_pos"}, False, False, False),
        ({"causal": False, "tree": True}, True, True, False),
        ({"causal": False, "bool_mask": "bits"}, True, True, True),
        ({"window": 9, "mask": "(kv_pos + head) % 3 != 0"}, True, True, True),
    ],
)
def test_masks(attention: dict[str, Any], predicate: bool, in_order: bool, never_full: bool) -> None:
    found = answers(**attention)
    assert (found["predicate"], found["in_order"], found["never_full"]) == (predicate, in_order, never_full)


@pytest.mark.parametrize(
    ("attention", "vectors"),
    [
        ({"soft_cap": 20.0, "head_scale": True}, True),
        ({"score": "score * sigmoid(score) / float(q_pos + 1000)"}, True),
        ({"alibi": True}, False),
        ({"score": "max(score, 0.0)"}, False),
        ({"score": "score + exp(score)"}, False),
        ({"score": "float(q_pos)"}, False),
    ],
)
def test_scores_are_changed_in_registers_where_the_key_does_not_matter(
    attention: dict[str, Any], vectors: bool
) -> None:
    found = answers(**attention)
    assert (found["vector_score"] is not None, found["score"] is not None) == (vectors, not vectors)


def test_a_unit_knows_what_its_texts_name() -> None:
    assert not any(answers(window=9)["unit_uses"].values())
    used = answers(causal=False, tree=True)["unit_uses"]
    assert used == {"args": True, "b": False, "q_row": True, "q_len": True, "first": True}
