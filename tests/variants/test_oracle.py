"""The oracle's reading of a text is the compiler's: two walkers, two evaluations, one meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen.passes.parse import FUNCTIONS
from kvgen.passes.terms import parsed
from kvgen.passes.validate import validate
from kvgen.reference import Terms
from kvgen.variants import Formula
from kvgen.variants.samples import sample_params
from tests.support.expressions import evaluate
from tests.support.specs import make_spec
from tests.variants.texts import MASKS, SCORES, params_in

LENS, STARTS = (3, 41), (0, 5, 12)
ALL = [("score", text) for text in SCORES] + [("mask", text) for text in MASKS]


@pytest.mark.parametrize(("key", "text"), ALL)
def test_oracle_and_compiler_read_alike(key: str, text: str) -> None:
    """At every (head, query, key) of two requests, one of them with more queries than keys."""
    raw = make_spec(kv_heads=2, group=2).to_dict()
    raw["attention"] |= {"causal": False, key: text, "params": params_in(text)}
    att = validate(raw).attention
    rng = np.random.default_rng(3)
    params = sample_params(validate(raw), kv_lens=LENS, q_starts=STARTS, rng=rng)
    node = parsed(key, Formula(text), att.params)
    for b, kv_len in enumerate(LENS):
        first, q_len = STARTS[b], STARTS[b + 1] - STARTS[b]
        terms = Terms(att, params)
        score = rng.standard_normal((att.q_heads, q_len, kv_len))
        got = terms.scored(score, b, first) if key == "score" else terms.visible(b, first, q_len, kv_len)
        got = np.broadcast_to(got, score.shape)
        for head, i, kv in np.ndindex(score.shape):
            q_pos = kv_len - q_len + i
            values: dict[str, Any] = {"head": head, "kv_head": head // 2, "batch": b, "q_row": first + i}
            values |= {"q_pos": q_pos, "kv_pos": kv, "kv_len": kv_len, "q_len": q_len}
            values |= {"score": score[head, i, kv]}
            values |= loads(params, values)
            want = evaluate(node, values)
            if key == "score":
                assert got[head, i, kv] == pytest.approx(want, rel=1e-9, abs=1e-9)
            else:
                assert got[head, i, kv] == want, values


def loads(params: dict[str, Any], at: dict[str, Any]) -> dict[str, Any]:
    """Elements by the name of their parameter; of ``tag``, which texts read at two places, see below."""
    found: dict[str, Any] = {}
    for name, array in params.items():
        if name in ("slope", "odd"):
            found[name] = array[at["head"]]
        elif name == "lead":
            found[name] = array[at["batch"]]
        elif name == "words":
            found[name] = array[at["q_row"]]
        elif name == "bias":
            found[name] = array[at["head"], at["kv_pos"]]
        elif name == "shown":
            found[name] = array[at["q_row"], at["kv_pos"] // 8] >> at["kv_pos"] % 8 & 1
        else:
            found[name] = lambda place, row=array[at["batch"]]: row[max(place, 0)]
    return {name: v if callable(v) else v.item() for name, v in found.items()}


def test_the_texts_use_all_functions() -> None:
    together = " ".join(SCORES + MASKS)
    assert [name for name in FUNCTIONS if f"{name}(" not in together] == []
