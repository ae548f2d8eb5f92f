"""Scores and masks of one's own in a spec, on the CPU and in the interpreter, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.builder import assemble
from kvgen.ir import Spec
from tests.support.compare import assert_attention
from tests.support.triton_calls import attend as interpreted
from tests.variants.calls import attend, spec_with
from tests.variants.texts import MASKS, SCORES, params_in

LENS, FEW, MANY = (0, 1, 8, 57, 130), (2, 3, 1, 5, 8), (3, 2, 9, 20, 37)
"""Two requests have more queries than keys: their first rows are at negative positions."""

PAIRS = [
    (f"({SCORES[i]}) * 0.5 + 0.5 * ({SCORES[i + 1]})", f"({MASKS[i]}) or ({MASKS[i + 1]})") for i in (0, 2, 4)
]
"""Two texts of each kind at once: half the kernels."""


def spec_of(pair: tuple[str, str], **more: Any) -> Spec:
    score, mask = pair
    return spec_with(causal=False, score=score, mask=mask, params=params_in(*pair), **more)


@pytest.mark.parametrize("pair", PAIRS)
def test_cpu(pair: tuple[str, str]) -> None:
    lib = assemble(spec_of(pair), "cpu")
    for op, q_lens in (("decode", None), ("decode", FEW), ("prefill", MANY)):
        got, want = attend(lib, op, LENS, q_lens)
        assert_attention(got, want, "f32")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("op", "q_lens"), [("decode", FEW), ("prefill", MANY)])
def test_interpreter(pair: tuple[str, str], op: str, q_lens: tuple[int, ...]) -> None:
    got, want = interpreted(op, spec_of(pair), LENS, q_lens)
    assert_attention(tuple(map(torch.from_numpy, got)), tuple(map(torch.from_numpy, want)), "f32")
