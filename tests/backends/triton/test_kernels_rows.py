"""append, merge, copy and gather of the Triton backend, interpreted: bytes and states equal the oracle's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgen import reference
from tests.support.oracle import to_numpy
from tests.support.specs import FORMAT_TABLES, LAYOUTS, make_spec
from tests.support.triton_calls import Pools, kernel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def hostile_rows(tokens: int, heads: int, width: int) -> torch.Tensor:
    """Rows of zeros, NaN, infinities, outliers, denormals, ties and signed zeros among normal ones."""
    x = torch.randn(tokens, heads, width, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 0], x[1, 0, 3], x[2, 0, 5] = 0.0, float("nan"), -float("inf")
    x[3, 0, 0], x[4, 0], x[5, 0] = 1e4, 1e-35, 1e-42
    x[6, 0, :4], x[7, 0, :2] = torch.tensor([0.5, 1.5, 2.5, 127.0]), torch.tensor([-0.0, 3e38])
    return x


@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("given", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("stored", list(FORMAT_TABLES))
def test_append_writes_the_oracles_bytes_and_no_other(stored: str, given: str, width: int) -> None:
    spec = make_spec(stored, stored, head_dim=width)
    ours, theirs = Pools(spec, 3), Pools(spec, 3)
    k, v = (hostile_rows(9, 2, width).to(DTYPES[given]) for _ in range(2))
    slots = np.array([33, 5, 0, 47, -1, 20, 12, 13, 31], np.int64)
    values = ours.values() | {
        "k_new": k, "k_new_stride_tok": 2 * width, "k_new_stride_head": width,
        "v_new": v, "v_new_stride_tok": 2 * width,
        "v_new_stride_head": width, "slots": torch.from_numpy(slots), "num_tokens": 9,
    }  # fmt: skip
    kernel("append", spec, variant=given).launch(values)
    reference.append(
        spec, theirs.record, theirs.bytes, 3, to_numpy(k), to_numpy(v), slots, scales=theirs.oracle_scales
    )  # fmt: skip
    got, want = (reference.unpack(p.bytes, p.record, 3) for p in (ours, theirs))
    for name, array in want.items():
        bits = np.dtype(f"u{array.itemsize}")
        same = got[name].view(bits) == array.view(bits)
        if stored in DTYPES:  # the payload of a stored NaN is free
            same |= np.isnan(reference.widen(got[name])) & np.isnan(reference.widen(array))
        assert same.all(), f"{name}: {np.argwhere(~same)[:5].tolist()}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_moves_a_page_of_every_plane_and_nothing_else(layout: str) -> None:
    pools = Pools(make_spec("int8-token", "bf16", layout=layout, head_dim=72), 6)
    rng = np.random.default_rng(0)
    for pool in pools.bytes.values():
        pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
    want = {name: pool.copy() for name, pool in pools.bytes.items()}
    src, dst = [1, 5, 1], [2, 0, 4]
    for plane in pools.record.planes:
        view = reference.view(want, pools.record, plane.name, 6)
        view[dst] = view[src].copy()
    pages = {
        "src_pages": torch.tensor(src, dtype=torch.int32),
        "dst_pages": torch.tensor(dst, dtype=torch.int32),
    }
    kernel("copy", pools.spec).launch(pools.values() | pages | {"num_pairs": 3})
    for name, pool in pools.bytes.items():
        np.testing.assert_array_equal(pool, want[name])


@pytest.mark.parametrize("layout", ["hnd", "pairs"])
@pytest.mark.parametrize("stored", list(FORMAT_TABLES))
def test_gather_returns_what_is_stored_rounded_once(stored: str, layout: str) -> None:
    lens = [0, 5, 40]
    pools = Pools(make_spec(stored, stored, layout, page_size=6), 12)
    table = pools.fill(lens)
    outs = {side: torch.full((45, 2, 64), float("nan"), dtype=torch.bfloat16) for side in ("k", "v")}
    values: dict[str, Any] = pools.values() | {
        "page_table": torch.from_numpy(table), "table_stride": table.shape[1], "batch": 3, "max_kv_len": 40,
        "kv_lens": torch.tensor(lens, dtype=torch.int32), "kv_starts": torch.tensor([0, 0, 5]),
    }  # fmt: skip
    for side, out in outs.items():
        values |= {f"{side}_out": out, f"{side}_out_stride_tok": 128, f"{side}_out_stride_head": 64}
    kernel("gather", pools.spec, variant="bf16").launch(values)
    want = reference.gather(
        pools.spec, pools.record, pools.bytes, 12, table, lens, scales=pools.oracle_scales
    )  # fmt: skip
    for out, rows in zip(outs.values(), want, strict=True):
        exact = torch.from_numpy(np.concatenate(rows).astype(np.float32)).to(torch.bfloat16)
        assert torch.equal(out, exact)


@pytest.mark.parametrize("states", [0, 1, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_merge_is_right_for_empty_states_and_in_place(states: int, in_place: bool) -> None:
    spec = make_spec(group=3, head_dim=80)
    outs, lses = torch.randn(states, 3, 6, 80), torch.randn(states, 3, 6) * 3
    if states:
        lses[0, 0], outs[0, 0], lses[:, 1] = -float("inf"), float("nan"), -float("inf")
        lses[1:, 2] = -float("inf")
    elif in_place:
        pytest.skip("no state to write over")
    want = reference.merge(outs.numpy(), lses.numpy())
    alone = outs[0, 2].clone() if states else None
    out = outs[0] if in_place else torch.full((3, 6, 80), float("nan"))
    lse = lses[0] if in_place else torch.full((3, 6), float("nan"))
    values = {
        "outs": outs, "outs_stride_state": 1440, "outs_stride_tok": 480, "outs_stride_head": 80,
        "lses": lses, "lses_stride_state": 18, "lses_stride_tok": 6, "out": out,
        "out_stride_tok": 480, "out_stride_head": 80,
        "lse": lse, "lse_stride_tok": 6, "num_states": states, "num_tokens": 3,
    }  # fmt: skip
    kernel("merge", spec, variant="f32").launch(values)
    np.testing.assert_allclose(out.numpy(), want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), want[1], rtol=1e-5, atol=1e-5)
    if alone is not None:
        assert torch.equal(out[2], alone), "a state that meets only empty ones comes back bit by bit"
