"""decode and prefill of the Triton backend, interpreted, against the oracle on poisoned caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgen.errors import ArgumentError, ToolchainError
from tests.support.specs import make_spec
from tests.support.triton_calls import Pools, attend, kernel

LENS = [0, 1, 15, 16, 17, 150]
TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2}


def check(got: tuple[Any, Any], want: tuple[Any, Any], q_dtype: str) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=TOLERANCE[q_dtype], atol=TOLERANCE[q_dtype])
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(want[1]))
    finite = np.isfinite(want[1])
    # A query in two int8 digits is within 2e-5 of its row's largest element.
    np.testing.assert_allclose(got[1][finite], want[1][finite], rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("fold_rows", [0, 1])
@pytest.mark.parametrize("ids", ["inline", "ahead"])
@pytest.mark.parametrize("stored", ["bf16", "int8-token", "int8-head"])
def test_decode_is_right_for_every_shape_of_its_loop(stored: str, ids: str, fold_rows: int) -> None:
    spec = make_spec(stored, stored, group=4, head_dim=72, q_dtype="bf16")
    got, want = attend("decode", spec, LENS, ids=ids, fold_rows=fold_rows, tile=32, split_tokens=128)
    check(got, want, "bf16")


def test_decode_with_several_tiles_in_a_pass() -> None:
    spec = make_spec("bf16", "int8-token", group=4, q_dtype="bf16")
    check(*attend("decode", spec, LENS, unroll=2, tile=16, split_tokens=128), "bf16")


@pytest.mark.parametrize("q_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("stored", ["f32", "f16", "bf16", "int8-token", "int8-tensor"])
def test_every_pair_of_types_meets_in_a_product_that_holds_both(stored: str, q_dtype: str) -> None:
    got, want = attend("decode", make_spec(stored, stored, group=3, q_dtype=q_dtype), [40, 3])
    check(got, want, q_dtype)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 256])
def test_pages_below_at_and_above_the_tile_and_of_no_power_of_two(page_size: int) -> None:
    spec = make_spec("int8-token", "bf16", page_size=page_size, group=2)
    got, want = attend("decode", spec, [0, 1, 63, 65, 300], tile=64, split_tokens=128)
    check(got, want, "f32")


@pytest.mark.parametrize("mask", [(True, None), (True, 20), (False, None), (False, 20)])
def test_ragged_queries_see_their_own_keys(mask: tuple[bool, int | None]) -> None:
    spec = make_spec("int8-token", "bf16", mask=mask, group=7, q_dtype="f16")
    lens, q_lens = [0, 5, 40, 150], [2, 8, 1, 3]
    check(*attend("decode", spec, lens, q_lens, split_tokens=128), "f16")
    check(*attend("prefill", spec, lens, [3, 17, 40, 30]), "f16")


def test_splits_outside_the_window_are_neither_written_nor_read() -> None:
    spec = make_spec(mask=(True, 10), group=2)
    check(*attend("decode", spec, [1000, 300, 5], tile=16, split_tokens=128), "f32")


def test_a_group_larger_than_a_row_tile_takes_several() -> None:
    check(*attend("decode", make_spec(group=40, kv_heads=1, head_dim=32), [20, 0, 33]), "f32")


def test_weights_keep_their_precision_beside_a_value_of_a_far_larger_scale() -> None:
    """Folded into f16 weights as they are, the scales of all other keys would be denormal."""

    def outlier(planes: dict[str, Any], table: Any) -> None:
        page = int(table[0, 0])
        planes["v"][page, :, 0, :] = 0
        planes["v"][page, :, 0, 0] = 1
        planes["v_scale"][page, :, 0] = 3e4

    spec = make_spec("f16", "int8-token", q_dtype="f16")
    check(*attend("decode", spec, [50], edit=outlier), "f16")


@pytest.mark.parametrize("stored", ["bf16", "int8-token"])
def test_nan_in_a_later_value_stays_there(stored: str) -> None:
    def poison(planes: dict[str, Any], table: Any) -> None:
        last = planes["v" if stored == "bf16" else "v_scale"][int(table[0, 1]), :, 3]
        last[...] = float("nan")

    got, want = attend("prefill", make_spec(stored, stored, group=2), [20], [4], edit=poison)
    assert np.isfinite(want[0][:3]).all() and np.isnan(want[0][3]).all()
    check(got, want, "f32")


def test_a_stride_that_breaks_the_promise_is_refused() -> None:
    pools = Pools(make_spec("bf16", "bf16"), 2)
    values = pools.values() | {"k_stride_page": 1032}
    with pytest.raises(ArgumentError, match=r"k_stride_page = 1032.*multiple of 16"):
        kernel("copy", pools.spec).launch(values)


def test_a_kernel_for_a_device_that_is_not_here_says_so() -> None:
    pools = Pools(make_spec("bf16", "bf16"), 2)
    pages = torch.zeros(1, dtype=torch.int32)
    built = kernel("copy", pools.spec, "sm_90")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ToolchainError, match="no GPU"):
        built.launch(pools.values() | {"src_pages": pages, "dst_pages": pages + 1, "num_pairs": 1})
