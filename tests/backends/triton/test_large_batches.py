"""Batches of more requests than an axis of a grid has blocks: several launches, the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.backends.triton import launch
from kvgen.backends.triton.launch import arguments, launches
from kvgen.errors import ArgumentError
from tests.backends.triton import test_kernels_coded, test_kernels_rows
from tests.backends.triton.test_terms_interpret import EVERY, check
from tests.support.specs import make_spec
from tests.support.triton_calls import Pools, attend, plan
from tests.support.triton_specs import variant_spec


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests a launch."""
    monkeypatch.setattr(launch, "MOST_REQUESTS", 2)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("keys", [EVERY, {"document": True, "causal": False}], ids=["every", "document"])
def test_prefill_in_several_launches(keys: dict[str, Any]) -> None:
    """Parameters of requests, lengths, tables and row starts are those of each launch's own requests."""
    spec = variant_spec(group=3, **keys)
    found = attend("prefill", spec, [7, 0, 40, 70, 12], [3, 0, 40, 20, 5])
    check(*found, spec.attention.q_dtype)


@pytest.mark.usefixtures("few")
def test_gather_and_append_in_several_launches() -> None:
    test_kernels_rows.test_gather_returns_what_is_stored_rounded_once("int8-token", "hnd")
    test_kernels_coded.test_gather_returns_what_codes_and_raw_rows_stand_for("raw-channels")
    test_kernels_coded.test_requests_keep_raw_rows_and_close_blocks_as_the_oracle_does("channels")


def values_of(batch: int, width: int = 1) -> dict[str, Any]:
    counts = torch.zeros(batch + 1, dtype=torch.int32)
    rows = torch.zeros(1, 4, 64)
    return {
        "q": rows, "q_stride_tok": 256, "q_stride_head": 64, "q_starts": counts, "table_stride": width,
        "page_table": torch.zeros(batch, width, dtype=torch.int32), "kv_lens": counts[:batch], "batch": batch,
        "kv_starts": counts[:batch].long(), "out": rows, "out_stride_tok": 256, "out_stride_head": 64,
        "lse": rows[:, :, 0], "lse_stride_tok": 4, "max_q_len": 1, "max_kv_len": 16, "table_width": width,
        "score_scale": 1.0, "workspace": torch.zeros(1 << 30, dtype=torch.uint8, device="meta"),
        "k_out": rows, "k_out_stride_tok": 256, "k_out_stride_head": 64, "v_out": rows,
        "v_out_stride_tok": 256, "v_out_stride_head": 64,
    }  # fmt: skip


@pytest.mark.parametrize("op", ["prefill", "gather"])
@pytest.mark.parametrize("batch", [32768, 65536, 70000])
def test_65536_requests(op: str, batch: int) -> None:
    spec = make_spec("f32", "f32", kv_heads=2, group=2, head_dim=64)
    built = plan(op, spec, "sm_90")
    values = Pools(spec, 2).values() | values_of(batch)
    found = launches(built, values)
    assert [each.grid[2] for each in found] == [32768] * (batch // 32768) + [batch % 32768] * (
        batch % 32768 > 0
    )
    first = 0
    for each in found:
        given = arguments(each, values)
        taken = {param.value: given[param.name] for param in each.entry.params}
        assert all(count <= most for count, most in zip(each.grid, launch.AXIS, strict=True))
        assert taken["kv_lens"].data_ptr() == values["kv_lens"].data_ptr() + 4 * first
        assert taken["page_table"].data_ptr() == values["page_table"].data_ptr() + 4 * first
        if op == "prefill":
            assert taken["q_starts"].data_ptr() == values["q_starts"].data_ptr() + 4 * first
            assert len(taken["q_starts"]) == each.grid[2] + 1
        first += each.grid[2]
    assert first == batch


def test_what_makes_a_grid_too_long_is_named() -> None:
    spec = make_spec("f32", "f32", page_size=256, kv_heads=2, group=2, head_dim=64)
    built = plan("decode", spec, "sm_90", "single")
    width = 65536 * int(built.constant("SPLIT_TOKENS")) // 256
    values = Pools(spec, 2).values() | values_of(1)
    values |= {"table_width": width, "workspace": torch.zeros(1, dtype=torch.uint8).expand(1 << 33)}
    with pytest.raises(ArgumentError, match=rf"table_width = {width}: decode.* 65536 blocks.*split_tokens"):
        launches(built, values)
