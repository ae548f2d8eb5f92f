"""Conformance lines 16, 20 and 27: what the odd values become, and that they stay where they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.conformance.conftest import Build
from tests.support.compare import assert_attention, differences
from tests.support.oracle import OracleLibrary
from tests.support.specs import FACTORS, make_spec
from tests.support.world import World, plane_views

ODD = {
    "zeros": [0.0],
    "negative zeros": [-0.0],
    "an outlier": [1.0, 1e4, -2.0],
    "denormals": [1e-40, -3e-41, 1e-45],
    "below the smallest amax": [2.0**-101],
    "at the smallest amax": [2.0**-100, 2.0**-107],
    "largest": [3.4028234e38, 1.0],
    "beyond f16": [65519.0, 65520.0, 1e5],
    "halves": [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5],
    "inf": [math.inf, 1.0],
    "-inf": [-math.inf, 1.0],
    "NaN": [math.nan, 1.0],
}
"""Rows of K and V: the values given, repeated over head_dim."""


def odd_rows(heads: int, width: int) -> torch.Tensor:
    """[odd, heads, width]: head 0 holds the odd row, the other heads ordinary numbers."""
    rows = torch.from_numpy(np.random.default_rng(7).normal(0, 1, (len(ODD), heads, width))).float()
    for i, values in enumerate(ODD.values()):
        rows[i, 0] = torch.tensor((values * width)[:width])
    return rows


@pytest.mark.parametrize("name", FACTORS["format_k"])
def test_line_20_odd_values_are_stored_as_documented(build: Build, name: str) -> None:
    """Every stored byte equals the oracle's (a NaN's payload apart), the neighbours' too."""
    lib = build(make_spec(name, name, page_size=4, kv_heads=2, head_dim=72, align=1))
    world = World(lib, 5)
    rows, slots = odd_rows(2, 72), torch.randperm(16)[: len(ODD)]
    before = world.snapshot()
    lib.append(world.cache, world.tensor(rows), world.tensor(rows.flip(0)), world.tensor(slots))
    got = world.snapshot()
    for pool, flat in before.items():
        world.bytes[pool][:] = flat
    OracleLibrary(lib.spec).append(world.cache, rows, rows.flip(0), slots)
    for plane, want in plane_views(world.record, 5, world.bytes).items():
        have = plane_views(world.record, 5, got)[plane]
        assert not (found := differences(plane, have, want, 0.0)), found
        if not want.dtype.is_floating_point:
            continue
        sure = ~want.isnan()
        assert torch.equal(have.float().signbit()[sure], want.float().signbit()[sure]), (
            f"{plane}: the sign of a zero"
        )


@pytest.mark.parametrize("name", ["f32", "bf16", "int8-token", "int8-head"])
def test_line_20_odd_rows_poison_nobody_else(build: Build, name: str) -> None:
    """A NaN row of head 0 reaches neither head 1 nor another request; outlier rows read back as stored."""
    lib = build(make_spec(name, name, page_size=4, kv_heads=2, group=2))
    world = World(lib, 6)
    lens = [len(ODD), 5]
    table, lens_B = world.table(lens), world.ints(lens)
    rows = torch.cat([odd_rows(2, 64), torch.randn(5, 2, 64)])
    world.fill(table, lens, k=rows, v=rows)
    q = world.query(2)
    want = OracleLibrary(lib.spec).decode(q, world.cache, table, lens_B)
    for got in (
        lib.decode(q, world.cache, table, lens_B),
        lib.prefill(q, world.cache, table, lens_B, world.ints([0, 1, 2])),
    ):
        assert_attention((got[0][1:], got[1][1:]), (want[0][1:], want[1][1:]), "f32")
        assert_attention((got[0][:, 2:], got[1][:, 2:]), (want[0][:, 2:], want[1][:, 2:]), "f32")
        if name != "int8-head":  # which stores 0 for a NaN and saturates the rest
            assert got[0][0, :2].isnan().all()


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["f32", "bf16", "int8-token"])
def test_line_20_a_later_nan_does_not_reach_earlier_queries(build: Build, name: str, op: str) -> None:
    """A key that a query does not see contributes nothing to it, whatever it holds."""
    q_dtype = "bf16" if name == "bf16" else "f32"
    lib = build(make_spec(name, name, page_size=4, kv_heads=1, group=2, q_dtype=q_dtype))
    world = World(lib, 4)
    table, lens = world.table([9]), world.ints([9])
    k, v = torch.randn(9, 1, 64), torch.randn(9, 1, 64)
    k[7], v[7] = math.nan, math.nan
    world.fill(table, [9], k=k, v=v)
    q = world.query(6)
    want = OracleLibrary(lib.spec).prefill(q, world.cache, table, lens, torch.tensor([0, 6]))
    got = getattr(lib, op)(q, world.cache, table, lens, world.ints([0, 6]))
    assert want[0][:4].isfinite().all() and want[0][4:].isnan().all()
    assert_attention((got[0][:4], got[1][:4]), (want[0][:4], want[1][:4]), q_dtype)
    assert got[0][4:].isnan().all()


def test_line_16_static_scales_equal_the_plain_result(build: Build) -> None:
    """Integers over 4 and 2 stored with scales 0.25 and 0.5: the result of the same numbers in f32."""
    spec = make_spec("int8-head", "int8-tensor", kv_heads=2, group=2)
    k, v = (torch.randint(-99, 99, (40, 2, 64)) * scale for scale in (0.25, 0.5))
    found = []
    for lib, scales in (
        (build(spec), {"k": torch.tensor([0.25, 0.25]), "v": torch.tensor(0.5)}),
        (build(make_spec("f32", "f32", kv_heads=2, group=2)), None),
    ):
        world = World(lib, 4, scales=scales)
        table, lens = world.table([40]), world.ints([40])
        world.fill(table, [40], k=k, v=v)
        q = world.query(1)
        found.append((*lib.decode(q, world.cache, table, lens), *lib.gather(world.cache, table, lens)))
    for quantised, plain in zip(*found, strict=True):
        torch.testing.assert_close(quantised, plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0][2].float(), k.float()) and torch.equal(found[0][3].float(), v.float())


@pytest.mark.parametrize("stored", ["bf16", "f16"])
def test_line_27_every_code_reads_back_and_ties_go_to_even(build: Build, stored: str) -> None:
    """All 65,536 codes of a 16-bit format through gather; values halfway between two codes through append."""
    lib = build(make_spec(stored, stored, page_size=256, kv_heads=1, head_dim=256))
    world = World(lib, 1)
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    world.cache.k[0, 0] = codes.view(world.cache.k.dtype)
    world.cache.v[0, 0] = codes.view(world.cache.v.dtype)
    table, lens = world.ints([0]).reshape(1, 1), world.ints([256])
    k, _ = lib.gather(world.cache, table, lens, dtype=torch.float32)
    exact = world.cache.k[0, 0].float()
    assert torch.equal(k[:, 0].nan_to_num(7, 8, 9), exact.nan_to_num(7, 8, 9))
    finite = exact.ravel()[exact.ravel().isfinite()].double().sort().values
    middles = ((finite[1:] + finite[:-1]) / 2).float()
    middles = middles[: len(middles) // 256 * 256].reshape(-1, 1, 256)[:256]
    lib.append(world.cache, middles, middles, torch.arange(len(middles)))
    want = middles[:, 0].to(world.cache.k.dtype)
    assert torch.equal(world.cache.k[0, 0, : len(middles)], want)
