"""Texts that compile to less than they look like, on the CPU against the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.builder import assemble
from tests.support.compare import assert_attention
from tests.variants.calls import attend, spec_with

LENS, FEW = (0, 1, 8, 57), (2, 3, 9, 20)
TEXTS: dict[str, dict[str, Any]] = {
    "no score": {"score": "0", "soft_cap": 3.0},
    "no score, a head's": {"score": "head * 0.5"},
    "divisors that fold": {
        "causal": False,
        "mask": "kv_pos % (2 - 5) == -1 and kv_pos // (head - head) == 0 and q_pos // (2 - 5) <= kv_pos",
    },
}


@pytest.mark.parametrize("keys", TEXTS.values(), ids=TEXTS)
def test_cpu(keys: dict[str, Any]) -> None:
    lib = assemble(spec_with(**keys), "cpu")
    for op, q_lens in (("decode", None), ("prefill", FEW)):
        got, want = attend(lib, op, LENS, q_lens)
        assert_attention(got, want, "f32")
