"""Masks, scores, sinks, a V inside K, unrotated keys: interpreted attention against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen.ir import Spec
from tests.support.triton_calls import attend
from tests.support.triton_specs import LATENT, unturned, variant_spec

LENS, SHORT, LONG = [0, 5, 40, 150], [2, 8, 1, 3], [3, 17, 40, 30]
"""Keys, and queries of decode and of prefill: some have fewer keys than queries, so negative positions."""

TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}


def check(got: tuple[Any, Any], want: tuple[Any, Any], q_dtype: str, lse: float = 1e-4) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=TOLERANCE[q_dtype], atol=TOLERANCE[q_dtype])
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(want[1]))
    finite = np.isfinite(want[1])
    np.testing.assert_allclose(got[1][finite], want[1][finite], rtol=lse, atol=lse)


def run(spec: Spec, ops: str, lse: float = 1e-4, **more: Any) -> None:
    """``ops``: letters of single, multi and prefill."""
    for op in ops:
        if op == "p":
            found = attend("prefill", spec, LENS, LONG, **more)
        else:
            found = attend("decode", spec, LENS, SHORT if op == "m" else None, split_tokens=128, **more)
        check(*found, spec.attention.q_dtype, lse)


EVERY = {
    "window": 60, "kv_first": True, "head_scale": True, "alibi": {"heads": 12, "offset": 3}, "soft_cap": 20.0,
    "sink_logit": True,
}  # fmt: skip


def test_ranges_scores_and_sink_together() -> None:
    run(variant_spec(group=3, **EVERY), "smp")


def test_quantised_keys_and_values_beside_terms() -> None:
    run(variant_spec(k="int8-token", v="int8-token", group=4, q_dtype="bf16", **EVERY), "sp", 5e-4)


@pytest.mark.parametrize(
    ("keys", "ops"),
    [
        ({"causal": False, "chunk": 40}, "mp"),  # negative positions have chunks of their own
        ({"causal": False, "window": 33, "window_right": 20}, "mp"),
        ({"causal": False, "prefix_lm": True}, "p"),
        ({"document": True, "causal": False}, "smp"),
        ({"tree": True, "causal": False}, "mp"),
        ({"bool_mask": "bits", "causal": False, "sink_logit": True}, "sp"),
        ({"bool_mask": "bool"}, "m"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_masks(keys: dict[str, Any], ops: str) -> None:
    run(variant_spec(**keys), ops)


def test_an_own_mask_by_key_by_head_and_by_request() -> None:
    params = {
        "keep": {"dims": ["batch", "kv"], "dtype": "bits"},
        "all": {"dims": ["batch"], "dtype": "bool"},
    }
    mask = "keep[batch, kv_pos] and (all[batch] or head % 2 == 0 or kv_pos % 3 != 1) or q_row == kv_pos"
    run(variant_spec(mask=mask, params=params, v="f16"), "smp")


def test_an_own_score_that_reads_rows_and_keys() -> None:
    params = {
        "bias": {"dims": ["batch", "kv"], "dtype": "f32"},
        "pair": {"dims": ["q", "kv"], "dtype": "f32"},
    }
    score = "score * sigmoid(bias[batch, kv_pos]) + pair[q_row, kv_pos] - float(q_pos // 7) * 0.01"
    run(variant_spec(score=score, params=params, window=33), "smp")


def test_nothing_is_added_by_a_sink_of_minus_infinity() -> None:
    sinks = np.array([-np.inf, 1.0, -np.inf, -3.0], np.float32)
    run(variant_spec(sink_logit=True, causal=False), "sp", params={"sink_logit": sinks})


@pytest.mark.parametrize("keys", [{"tree": True}, {"bool_mask": "bool"}, {"window_right": 3}], ids=str)
def test_nan_and_infinity_reach_the_rows_that_see_them(keys: dict[str, Any]) -> None:
    """Rows see different keys of one tile; 0 * NaN must not reach those that do not see the key."""

    def poison(planes: dict[str, Any], table: Any) -> None:
        for at, value in ((31, float("nan")), (35, float("inf")), (38, -float("inf"))):
            planes["v"][int(table[0, at // 16]), :, at % 16, at % 5] = value

    spec = variant_spec(causal=False, v="f16", **keys)
    for op, queries in (("decode", [6]), ("prefill", [12])):
        got, want = attend(op, spec, [40], queries, edit=poison)
        assert np.isnan(want[0]).any() and np.isfinite(want[0]).any(axis=-1).any()
        np.testing.assert_allclose(got[0], want[0], rtol=2e-3, atol=2e-3)


def test_a_shared_prefix_is_seen_by_all_queries_and_has_no_sink() -> None:
    spec = variant_spec(sink_logit=True, soft_cap=20.0, group=5)
    check(*attend("decode", spec, [70, 0], [9, 4], variant="prefix", split_tokens=128), "f16")


LATENTS: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 576, "v_head_dim": 512, "page_size": 128, "group": 16, "k": "f16"}, "s"),  # runs of a page
    ({"head_dim": 96, "v_head_dim": 72, "group": 24, "k": "f16", "q_dtype": "bf16"}, "s"),  # two dots' types
    ({"head_dim": 96, "v_head_dim": 64, "k": "int8-token", "q_dtype": "bf16", "group": 16}, "p"),
    ({"head_dim": 96, "v_head_dim": 96, "k": "int8-head", "q_dtype": "f32", "sink_logit": True}, "s"),
    ({"head_dim": 96, "v_head_dim": 64, "k": "e4m3-token", "q_dtype": "bf16", "window": 33}, "m"),
]


@pytest.mark.parametrize(("keys", "ops"), LATENTS, ids=str)
def test_v_inside_k(keys: dict[str, Any], ops: str) -> None:
    run(variant_spec(v=LATENT, kv_heads=1, **keys), ops)


TURNED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"pairing": "half"}, {"head_dim": 80, "k": "f16", "group": 3}, "sp"),  # padded halves
    (
        {"pairing": "interleaved", "dim": 72},
        {"head_dim": 80, "window": 33, "k": "f32", "q_dtype": "f32"},
        "s",
    ),
    ({"pairing": "half", "dim": 32}, {"k": "int8-token", "q_dtype": "bf16", "alibi": True}, "sp"),
    ({"pairing": "half"}, {"k": "int4-token"}, "m"),
    ({"pairing": "interleaved"}, {"k": "e4m3-token", "q_dtype": "bf16"}, "p"),
]


@pytest.mark.parametrize(("rope", "keys", "ops"), TURNED, ids=str)
def test_unrotated_keys_are_turned_when_they_are_read(
    rope: dict[str, Any], keys: dict[str, Any], ops: str
) -> None:
    # A turned key is rounded to the type of the dot, 2**-11 of it.
    run(variant_spec(rope=unturned(**rope), **keys), ops, 1e-4 if keys.get("q_dtype") == "f32" else 2e-3)
