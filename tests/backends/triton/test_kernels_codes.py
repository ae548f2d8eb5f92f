"""decode and prefill of the Triton backend over int4, e4m3 and blocks of d, interpreted, with the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen.errors import UnsupportedError
from kvgen.ir import Spec
from tests.backends.triton.test_kernels_attention import check
from tests.support.specs import make_spec
from tests.support.triton_calls import attend, plan

SMALL = ("int4-token", "int4-head", "int4-block", "int8-block", "e4m3-token", "e4m3-tensor", "e4m3-block")
LENS = [0, 1, 17, 150]


@pytest.mark.parametrize("fold_rows", [0, 1])
@pytest.mark.parametrize("stored", SMALL)
def test_decode_with_and_without_folded_rows(stored: str, fold_rows: int) -> None:
    spec = make_spec(stored, stored, group=4, head_dim=96, q_dtype="bf16")
    check(*attend("decode", spec, LENS, fold_rows=fold_rows, tile=32, split_tokens=128), "bf16")


@pytest.mark.parametrize("q_dtype", ["f32", "f16"])
@pytest.mark.parametrize("stored", SMALL)
def test_decode_with_every_type_of_query(stored: str, q_dtype: str) -> None:
    check(*attend("decode", make_spec(stored, stored, group=3, q_dtype=q_dtype), [40, 3]), q_dtype)


@pytest.mark.parametrize("stored", ["int4-token", "int4-block", "e4m3-tensor", "e4m3-token"])
def test_ragged_queries(stored: str) -> None:
    spec = make_spec(stored, stored, group=7, mask=(True, 20), q_dtype="f16")
    lens, q_lens = [0, 5, 40, 150], [2, 8, 1, 3]
    check(*attend("decode", spec, lens, q_lens, split_tokens=128), "f16")
    check(*attend("prefill", spec, lens, [3, 17, 40, 30]), "f16")


@pytest.mark.parametrize("layout", ["columns", "quads", "token-record", "packed-k"])
@pytest.mark.parametrize("stored", ["int4-token", "e4m3-token", "int8-block"])
def test_layouts_with_and_without_words_of_two_bytes(stored: str, layout: str) -> None:
    check(*attend("decode", make_spec(stored, stored, layout, group=2, q_dtype="f16"), [0, 5, 40]), "f16")


@pytest.mark.parametrize(
    "pair", [("int4-token", "bf16"), ("e4m3-token", "int8-token"), ("f16", "int4-block")]
)
def test_sides_of_different_formats(pair: tuple[str, str]) -> None:
    check(*attend("decode", make_spec(*pair, group=4, q_dtype="f16"), [33, 100]), "f16")


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_nan_of_e4m3_reaches_those_who_see_it_and_no_other(side: str) -> None:
    """Given scales cannot be NaN, so a NaN is the code 0x7f."""

    def poison(planes: dict[str, Any], table: Any) -> None:
        planes[side].view(planes[side].dtype)[int(table[0, 1]), :, 3] = float("nan")

    spec = make_spec("e4m3-tensor", "e4m3-tensor", group=2, q_dtype="f16")
    got, want = attend("prefill", spec, [20], [4], edit=poison)
    assert np.isfinite(want[0][:3]).all() and np.isnan(want[0][3]).all()
    check(got, want, "f16")


def test_blocks_of_very_different_scales() -> None:
    """Weights meet every block's scale as f16: neither may leave its range."""

    def outlier(planes: dict[str, Any], table: Any) -> None:
        planes["v_scale"][int(table[0, 0]), :, 0, 1] *= 3e4

    check(*attend("decode", make_spec("f16", "int8-block", q_dtype="f16"), [50], edit=outlier), "f16")


@pytest.mark.parametrize("fold_rows", [0, 1])
@pytest.mark.parametrize("stored", ["int8-token", "int4-head"])
def test_an_int8_query_is_the_oracles(stored: str, fold_rows: int) -> None:
    spec = with_modes(make_spec(stored, stored, group=4, q_dtype="f16"), qk="int8")
    check(*attend("decode", spec, [50, 3], fold_rows=fold_rows), "f16")
    check(*attend("prefill", spec, [50], [20]), "f16")


def test_int8_modes_without_a_kernel_name_what_works() -> None:
    spec = make_spec("int8-token", "int8-token", q_dtype="f16")
    with pytest.raises(UnsupportedError, match=r'attention.pv = "int8".*pv = "exact"'):
        plan("decode", with_modes(spec, pv="int8"), "sm_90")
    spec = make_spec("int8-token", "int8-token", q_dtype="f32")
    with pytest.raises(UnsupportedError, match=r'attention.qk = "int8".*qk = "exact"'):
        plan("decode", with_modes(spec, qk="int8"), "sm_90")


def with_modes(spec: Spec, **modes: Any) -> Spec:
    """The spec with other products."""
    return replace(spec, attention=replace(spec.attention, **modes))
