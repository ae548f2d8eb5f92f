"""Interpreted attention over codecs that become numbers as they are read, against the f64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen import load_spec
from kvgen.ir import Spec

pytest.importorskip("torch")

from tests.support.triton_calls import attend

ROW = {"tok": 1, "head": 1}
CHANNEL = {"head": 1, "tok": 16, "d": 1}
HALF = {"affine": True, "scale_dtype": "f16"}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "channels": ({"format": "int2", "group": CHANNEL} | HALF, {"format": "int4", "group": ROW} | HALF, {}),
    "raw": ({"format": "int8"}, {"format": "int4"}, {"keep_first": 3, "keep_last": 9}),
    "planes": ({"format": "int3", "affine": True, "group": ROW | {"d": 16}}, {"format": "e5m2"}, {}),
    "powers": ({"format": "mxfp4"}, {"format": "nvfp4"}, {}),
    "rotated": (
        {"format": "lloyd3", "group": ROW, "transform": "hadamard", "mean": True},
        {"format": "lloyd4", "group": ROW, "transform": "hadamard"},
        {},
    ),
    "span": ({"format": "int8", "group": {"head": 1, "tok": 16}}, {"format": "bf16"}, {"keep_first": 2}),
}


def spec(name: str) -> Spec:
    k, v, more = PAIRS[name]
    attention = {"q_heads": 4, "kv_heads": 2, "head_dim": 64 if name == "powers" else 32}
    return load_spec({"attention": attention, "cache": {"page_size": 16, "k": k, "v": v} | more})


@pytest.mark.parametrize("name", PAIRS)
def test_decode_is_the_oracles(name: str) -> None:
    (out, lse), (want, want_lse) = attend("decode", spec(name), [0, 17, 50])
    np.testing.assert_allclose(out, want, atol=2e-2)
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)


@pytest.mark.parametrize("name", ["channels", "rotated", "span"])
def test_prefill_is_the_oracles(name: str) -> None:
    (out, lse), (want, want_lse) = attend("prefill", spec(name), [19, 50], [3, 18])
    np.testing.assert_allclose(out, want, atol=3e-2)
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)


@pytest.mark.parametrize("mean", [False, True])
def test_a_query_of_codes_breaks_ties_as_the_oracle(mean: bool) -> None:
    """bf16 queries often hold half of their largest element: code 63.5, decided by one bit of 1 / scale."""
    attention = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "qk": "int8"}
    k, v = {"format": "int8", "mean": mean}, {"format": "int8", "affine": True, "group": ROW}
    coded = load_spec({"attention": attention, "cache": {"page_size": 16, "k": k, "v": v}})
    (_, lse), (_, want_lse) = attend("prefill", coded, [50], [18])
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_freed_pages_before_a_window_may_hold_nan() -> None:
    k, v, more = PAIRS["raw"]
    attention = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "window": 11}
    windowed = load_spec({"attention": attention, "cache": {"page_size": 16, "k": k, "v": v} | more})

    def free(planes: dict[str, Any], table: Any) -> None:
        page = int(table[0, 0])
        for name in ("k_scale", "v_scale"):
            planes[name][page] = float("nan")
        for name in ("k_raw", "v_raw"):
            planes[name][int(planes["raw_rows"][page])] = float("nan")

    (out, lse), (want, want_lse) = attend("prefill", windowed, [50], [9], free)
    np.testing.assert_allclose(out, want, atol=3e-2)
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
