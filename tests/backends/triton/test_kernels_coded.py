"""append and gather of the Triton backend, code by code, interpreted: the oracle's bytes and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvgen import reference
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.reference.layout import view
from tests.backends.triton.test_kernels_rows import DTYPES, hostile_rows
from tests.support.oracle import to_numpy
from tests.support.triton_calls import Pools, kernel

ROW = {"head": 1, "tok": 1}
BLOCK = {**ROW, "d": 16}
CHANNEL = {"head": 1, "tok": 4, "d": 1}
SPAN = {"head": 1, "tok": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mx": ({"format": "mxfp8"}, {"format": "mxfp4"}, {}),
    "nv": ({"format": "nvfp4"}, {"format": "e2m1", "group": BLOCK, "outer": {"head": 1}}, {}),
    "e5m2": ({"format": "e5m2", "group": ROW}, {"format": "e5m2", "group": {"head": 1}}, {}),
    "small-scales": (
        {"format": "int8", "group": BLOCK, "scale_dtype": "e4m3", "outer": {"head": 1}},
        {"format": "int8", "group": ROW, "scale_dtype": "e8m0"},
        {},
    ),
    "affine": (
        {"format": "int8", "affine": True, "group": ROW, "scale_dtype": "f16"},
        {"format": "int4", "affine": True, "group": BLOCK, "scale_dtype": "bf16"},
        {},
    ),
    "packed": (
        {"format": "int3", "affine": True, "group": {**ROW, "d": 32}},
        {"format": "int2", "group": BLOCK, "scales": "pool"},
        {},
    ),
    "signed": (
        {"format": "int3", "group": ROW, "scale_dtype": "bf16", "scales": "inline"},
        {"format": "int2", "affine": True, "group": ROW, "scale_dtype": "f16"},
        {},
    ),
    "tables": (
        {"format": "lloyd3", "group": ROW, "transform": "hadamard"},
        {"format": "table", "levels": [-1.0, -0.5, 0.0, 0.5, 1.0], "group": BLOCK},
        {},
    ),
    "given-tables": (
        {"format": "lloyd2", "group": BLOCK, "scale_dtype": "f16"},
        {"format": "table", "levels": [-2.0, 0.5, 3.0], "group": {"head": 1}},
        {},
    ),
    "mean": ({"format": "int8", "mean": True, "transform": "hadamard"}, {"format": "e4m3"}, {}),
    "padded": ({"format": "int4", "affine": True, "group": ROW}, {"format": "e5m2", "group": ROW}, {"d": 72}),
    "pieces": (
        {"format": "int2", "affine": True, "group": {**ROW, "d": 48}},
        {"format": "int8", "affine": True, "group": {**ROW, "d": 48}},
        {"d": 96},
    ),
    "segments": (
        {
            "segments": [{"size": 48, "format": "e4m3", "group": ROW}, {"size": 16, "format": "bf16"}],
            "scales": "inline",
        },
        {"format": "f16"},
        {},
    ),
    "turned": (
        {"format": "int4", "affine": True, "group": ROW},
        {"format": "int8"},
        {"rope": {"kind": "default", "dim": 32}},
    ),
}
RAW: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "channels": (
        {"format": "int2", "affine": True, "group": CHANNEL, "scale_dtype": "f16"},
        {"format": "int2", "affine": True, "group": BLOCK},
        {"keep_first": 3, "keep_last": 6},
    ),
    "spans": (
        {"format": "int8", "group": {"head": 1, "tok": 2}, "transform": "hadamard"},
        {"format": "lloyd3", "group": SPAN},
        {"keep_first": 5},
    ),
    "odd": (
        {"format": "int3", "group": {"head": 1, "tok": 3}},
        {"format": "int4", "affine": True, "group": {"head": 1, "tok": 6, "d": 16}},
        {},
    ),
    "rows": ({"format": "int8"}, {"format": "bf16"}, {"keep_first": 2, "keep_last": 5}),
    "given": ({"format": "e4m3", "group": {}}, {"format": "e5m2", "group": {"head": 1}}, {"keep_last": 1}),
    "turned": (
        {"format": "e2m1", "group": {"head": 1, "tok": 4, "d": 16}, "mean": True},
        {"format": "int8", "affine": True, "group": CHANNEL},
        {"keep_last": 2, "rope": {"kind": "default", "dim": 64}},
    ),
}  # fmt: skip


def spec_of(k: dict[str, Any], v: dict[str, Any], more: dict[str, Any], page: int) -> Spec:
    """A spec of two KV heads."""
    own = dict(more)
    attention = {"q_heads": 2, "kv_heads": 2, "head_dim": own.pop("d", 64)}
    if "rope" in own:
        attention["rope"] = own.pop("rope")
    return load_spec({"attention": attention, "cache": {"page_size": page, "k": k, "v": v, **own}})


def new_values(spec: Spec, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """New rows by ABI name."""
    found: dict[str, Any] = {}
    for side, x in (("k", k), ("v", v)):
        strides = {"tok": x.stride(0), "head": x.stride(1)}
        found |= {f"{side}_new": x} | {f"{side}_new_stride_{dim}": step for dim, step in strides.items()}
    if spec.attention.rope:
        table = torch.randn(64, spec.attention.rope.dim, generator=torch.Generator().manual_seed(5))
        found |= {"param_rope_table": table, "param_rope_table_stride_kv": table.stride(0)}
    return found


def assert_same_bytes(ours: Pools, theirs: Pools) -> None:
    """Every byte of the pages and of raw rows; the payload of a stored float's NaN is free."""
    got, want = (reference.unpack(p.bytes, p.record, p.pages) for p in (ours, theirs))
    if ours.raw_rows is not None:
        for found, pools in ((got, ours), (want, theirs)):
            rows = len(pools.bytes["raw"]) // pools.record.raw_bytes()
            found |= {p.name: view(pools.bytes, pools.record, p.name, rows) for p in ours.record.raw}
    for name, array in want.items():
        bits = np.dtype(f"u{array.itemsize}")
        same = got[name].view(bits) == array.view(bits)
        if array.dtype.itemsize > 1 and not name.endswith(("_scale", "_min")):
            same |= np.isnan(reference.widen(got[name])) & np.isnan(reference.widen(array))
        assert same.all(), f"{name}: {np.argwhere(~same)[:5].tolist()}"


@pytest.mark.parametrize("name", CASES)
def test_rows_become_the_oracles_bytes_and_no_other(name: str) -> None:
    spec = spec_of(*CASES[name], page=16)
    ours, theirs = Pools(spec, 3), Pools(spec, 3)
    given = ("f32", "bf16", "f16")[len(name) % 3]
    width = spec.attention.head_dim
    k, v = (hostile_rows(9, 2, width).to(DTYPES[given]) for _ in range(2))
    v = v.roll(1, 0)
    slots = np.array([33, 5, 0, 47, -1, 20, 12, 13, 31], np.int64)
    values = ours.values() | new_values(spec, k, v)
    values |= {"slots": torch.from_numpy(slots), "num_tokens": 9}
    known = {key: value for key, value in theirs.known.items() if key != "raw_rows"}
    if spec.attention.rope:
        values["positions"] = torch.arange(9, dtype=torch.int32) * 3
        table = values["param_rope_table"].numpy()
        known |= {"positions_T": np.arange(9) * 3, "params": {"rope_table": table}}
    kernel("append", spec, variant=given).launch(values)
    reference.append(spec, theirs.record, theirs.bytes, 3, to_numpy(k), to_numpy(v), slots, **known)
    assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("name", RAW)
def test_requests_keep_raw_rows_and_close_blocks_as_the_oracle_does(name: str) -> None:
    """Appends of ragged lengths, two of them, in pages that lie anywhere."""
    spec = spec_of(*RAW[name], page=12)
    ours, theirs = Pools(spec, 12), Pools(spec, 12)
    raw = spec.cache.raw
    assert raw is not None
    table = np.array([[7, 2, 11], [0, 9, 4], [5, 3, 8]], np.int32)
    for pools in (ours, theirs):
        assert pools.raw_rows is not None
        pools.raw_rows[table.reshape(-1)] = np.random.default_rng(1).permutation(9).astype(np.int32)
    append = kernel("append", spec, variant="bf16")
    for old, lens in (([0, 0, 0], [1, 13, 25]), ([1, 13, 25], [2, 30, 25])):
        news = [b - a for a, b in zip(old, lens, strict=True)]
        starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
        width = spec.attention.head_dim
        generator = torch.Generator().manual_seed(sum(lens))
        k, v = (torch.randn(int(starts[-1]), 2, width, generator=generator).bfloat16() for _ in range(2))
        k[-1, 0, 3], v[-3, 1, 2], k[0], v[-2, 0] = float("nan"), float("inf"), 0.0, 1.5
        values = ours.values() | new_values(spec, k, v)
        values |= {
            "q_starts": torch.from_numpy(starts), "page_table": torch.from_numpy(table), "table_stride": 3,
            "kv_lens": torch.tensor(lens, dtype=torch.int32), "batch": 3, "max_new_len": max(news),
            "table_width": 3,
        }  # fmt: skip
        append.launch(values)
        known = dict(theirs.known)
        if spec.attention.rope:
            known["params"] = {"rope_table": values["param_rope_table"].numpy()}
        where = (spec, theirs.record, theirs.bytes, 12)
        reference.append_requests(*where, to_numpy(k), to_numpy(v), table, lens, starts, **known)
        assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("name", [*CASES, *(f"raw-{name}" for name in RAW)])
def test_gather_returns_what_codes_and_raw_rows_stand_for(name: str) -> None:
    raw = name.startswith("raw-")
    spec = spec_of(*(RAW[name[4:]] if raw else CASES[name]), page=12)
    spec = replace(spec, attention=replace(spec.attention, rope=None))
    lens, width = [0, 5, 26], spec.attention.head_dim
    pools = Pools(spec, 8)
    table = pools.fill(lens)
    outs = {side: torch.full((31, 2, width), float("nan")) for side in ("k", "v")}
    values: dict[str, Any] = pools.values() | {
        "page_table": torch.from_numpy(table), "table_stride": table.shape[1], "batch": 3, "max_kv_len": 26,
        "kv_lens": torch.tensor(lens, dtype=torch.int32), "kv_starts": torch.tensor([0, 0, 5]),
    }  # fmt: skip
    for side, out in outs.items():
        values |= {f"{side}_out": out, f"{side}_out_stride_tok": 2 * width, f"{side}_out_stride_head": width}
    kernel("gather", spec, variant="f32", tile=16).launch(values)
    want = reference.gather(spec, pools.record, pools.bytes, 8, table, lens, **pools.known)
    for out, rows in zip(outs.values(), want, strict=True):
        np.testing.assert_allclose(out.numpy(), np.concatenate(rows), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["packed", "signed", "segments"])
def test_copy_moves_every_plane_of_a_page_wherever_it_lies(name: str) -> None:
    pools = Pools(spec_of(*CASES[name], page=16), 4)
    rng = np.random.default_rng(0)
    for pool in pools.bytes.values():
        pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
    want = {key: pool.copy() for key, pool in pools.bytes.items()}
    for plane in pools.record.planes:
        whole = view(want, pools.record, plane.name, 4)
        whole[[0, 3]] = whole[[2, 1]].copy()
    pages = {"src_pages": torch.tensor([2, 1]).int(), "dst_pages": torch.tensor([0, 3]).int()}
    kernel("copy", pools.spec).launch(pools.values() | pages | {"num_pairs": 2})
    for key, pool in pools.bytes.items():
        np.testing.assert_array_equal(pool, want[key])


@pytest.mark.parametrize(
    ("op", "name", "target"),
    [
        ("append", "raw-channels", "sm_90"),
        ("append", "packed", "gfx942"),
        ("gather", "nv", "sm_80"),
    ],
)
def test_compiled_rows_spill_nothing(op: str, name: str, target: str) -> None:
    found = RAW[name[4:]] if name.startswith("raw-") else CASES[name]
    facts = kernel(op, spec_of(*found, page=12), target, "bf16").resources()[op]
    assert facts["spill_bytes"] == 0 and facts["spilled_registers"] == 0
