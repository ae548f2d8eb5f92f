"""Conformance lines 1 to 8: infinities, empty sets and states, poison."""

from __future__ import annotations

import math

import pytest
import torch

from kvgen.runtime.cache import torch_dtype
from tests.conformance.conftest import Build
from tests.support.compare import assert_attention
from tests.support.oracle import OracleLibrary
from tests.support.specs import make_spec
from tests.support.world import World

LOG2E = math.log2(math.e)


def starts(world: World, *lens: int) -> torch.Tensor:
    return world.ints([0, *torch.tensor(lens).cumsum(0).tolist()])


def test_line_01_very_negative_logits(build: Build) -> None:
    """A finite mask sentinel would win over a logit of -524,288 * scale, and give 0."""
    lib = build(make_spec("f32", "f32", page_size=1, kv_heads=4, group=8, head_dim=128))
    world = World(lib, 17)
    k, v = torch.full((2, 4, 128), -64.0), torch.ones(2, 4, 128)
    lib.append(world.cache, world.tensor(k), world.tensor(v), world.ints([15, 16], torch.int64))
    q = world.tensor(torch.full((1, 32, 128), 64.0))
    table, lens = world.ints([15, 16]).reshape(1, 2), world.ints([2])
    for scale in (None, 1.0):
        out, lse = lib.decode(q, world.cache, table, lens, scale=scale)
        assert (out == 1).all()
        logit = -64.0 * 64.0 * 128 * (128**-0.5 if scale is None else scale)
        expected = torch.full((1, 32), logit * LOG2E + 1, dtype=torch.float64)
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_line_02_one_key_gives_v(build: Build, dtype: str) -> None:
    lib = build(make_spec(dtype, dtype, q_dtype=dtype, kv_heads=2, group=2))
    world = World(lib, 4)
    lens = [1, 1, 1]
    table = world.table(lens)
    v = world.normal(3, 2, 64, dtype=torch_dtype(dtype))
    world.fill(table, lens, torch_dtype(dtype), v=v)
    expected = v.repeat_interleave(2, 1)
    q, lens_B = world.query(3), world.ints(lens)
    for out, _ in (
        lib.decode(q, world.cache, table, lens_B),
        lib.decode(q, world.cache, table, lens_B, starts(world, 1, 1, 1)),
        lib.prefill(q, world.cache, table, lens_B, starts(world, 1, 1, 1)),
    ):
        assert (out.double() == expected.double()).all()


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_line_03_fully_masked_rows(build: Build, op: str) -> None:
    """34 queries and one key: only the last query sees it."""
    lib = build(make_spec("f32", "f32", kv_heads=1, group=2))
    world = World(lib, 2)
    table = world.table([1])
    world.fill(table, [1], k=torch.zeros(1, 1, 64), v=torch.ones(1, 1, 64))
    q = world.tensor(torch.zeros(34, 2, 64))
    out, lse = getattr(lib, op)(q, world.cache, table, world.ints([1]), starts(world, 34))
    assert (out[:33] == 0).all() and (lse[:33] == -math.inf).all()
    assert (out[33] == 1).all() and (lse[33] == 0).all()


def test_line_04_empty_chunk_under_split(engine: str, build: Build) -> None:
    """The last key stands alone in its split, and the first of two queries does not see it."""
    split = 128 if engine == "interpret" else 256
    lens = [split + 1, 3]
    spec = make_spec("f32", "f32", page_size=16, kv_heads=2, group=4, head_dim=128)
    found = []
    for lib in (build(spec, split), build(spec, 1024)):
        world = World(lib, 20)
        table, lens_B, q_starts = world.table(lens), world.ints(lens), starts(world, 2, 2)
        world.fill(table, lens)
        q = world.query(4)
        got = lib.decode(q, world.cache, table, lens_B, q_starts, **world.outputs(4))
        assert_attention(got, OracleLibrary(spec).decode(q, world.cache, table, lens_B, q_starts), "f32")
        found.append(got)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_line_04_rows_without_keys_under_split(engine: str, build: Build) -> None:
    """More queries than keys: the first rows are empty in every split, and in their merge."""
    split, kv, q_len = (128, 130, 140) if engine == "interpret" else (256, 260, 300)
    lib = build(make_spec("f32", "f32", page_size=16, kv_heads=1, group=1), split)
    world = World(lib, 20)
    table, lens, q_starts = world.table([kv]), world.ints([kv]), starts(world, q_len)
    world.fill(table, [kv])
    q = world.query(q_len)
    out, lse = lib.decode(q, world.cache, table, lens, q_starts)
    empty = q_len - kv
    assert (out[:empty] == 0).all() and (lse[:empty] == -math.inf).all()
    assert_attention((out, lse), OracleLibrary(lib.spec).decode(q, world.cache, table, lens, q_starts), "f32")


def test_line_05_empty_request_beside_a_full_one(build: Build) -> None:
    lib = build(make_spec("f32", "f32", page_size=16, kv_heads=2, group=4))
    world = World(lib, 12)
    lens = [0, 129]
    table = world.table(lens)
    world.fill(table, lens)
    q = world.query(2)
    one = lib.decode(q, world.cache, table, world.ints(lens))
    assert (one[0][0] == 0).all() and (one[1][0] == -math.inf).all()
    assert one[0].isfinite().all() and one[1][1].isfinite().all()
    want = OracleLibrary(lib.spec).decode(q, world.cache, table, world.ints(lens))
    assert_attention(one, want, "f32")
    assert_attention(lib.prefill(q, world.cache, table, world.ints(lens), starts(world, 1, 1)), want, "f32")


class TestLine06And08Merge:
    def spec(self) -> object:
        return make_spec("f32", "f32", kv_heads=1, group=3)

    def test_line_06_empty_states(self, build: Build) -> None:
        """(0, -inf) out of any number of empty states, whose rows may hold NaN; also none at all."""
        lib = build(self.spec())
        for count in (0, 1, 2, 5):
            outs, lses = torch.full((count, 2, 3, 64), math.nan), torch.full((count, 2, 3), -math.inf)
            out, lse = lib.merge(outs, lses)
            assert (out == 0).all() and (lse == -math.inf).all()

    def test_line_06_one_empty_and_one_finite(self, build: Build) -> None:
        lib = build(self.spec())
        outs, lses = torch.randn(2, 2, 3, 64), torch.randn(2, 2, 3)
        outs[0, 0], lses[0, 0] = math.nan, -math.inf
        outs[1, 1], lses[1, 1] = math.nan, -math.inf
        out, lse = lib.merge(outs, lses)
        assert (out[0] == outs[1, 0]).all() and (lse[0] == lses[1, 0]).all()
        assert (out[1] == outs[0, 1]).all() and (lse[1] == lses[0, 1]).all()

    @pytest.mark.parametrize("target", [0, 1, 2])
    def test_line_06_in_place(self, build: Build, target: int) -> None:
        lib = build(self.spec())
        outs, lses = torch.randn(3, 4, 3, 64), torch.randn(3, 4, 3)
        lses[:, 1], lses[1, 2] = -math.inf, -math.inf
        out, lse = OracleLibrary(lib.spec).merge(outs, lses)
        lib.merge(outs, lses, out=outs[target], lse=lses[target])
        torch.testing.assert_close(outs[target].double(), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lses[target].double(), lse, rtol=1e-5, atol=1e-5)

    def test_line_08_very_negative_lse_on_both_sides(self, build: Build) -> None:
        """A running maximum that starts at a large negative number would swallow -1e5."""
        lib = build(self.spec())
        outs = torch.stack([torch.zeros(1, 3, 64), torch.ones(1, 3, 64)])
        lses = torch.tensor([-1e5, -1e5 + 1]).reshape(2, 1, 1).repeat(1, 1, 3)
        out, lse = lib.merge(outs, lses)
        torch.testing.assert_close(out.double(), torch.full_like(out, 2 / 3).double(), rtol=1e-6, atol=0)
        expected = -1e5 + 1 + math.log2(1.5)
        torch.testing.assert_close(lse.double(), torch.full_like(lse, expected).double(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("formats", [("f32", "f32"), ("int8-token", "int8-token")], ids=["f32", "int8"])
def test_line_07_poison_stays_where_it_is(build: Build, formats: tuple[str, str]) -> None:
    """NaN in unused slots of the last page, in unreferenced pages and in another request's."""
    lib = build(make_spec(*formats, page_size=4, kv_heads=2, group=2))
    world = World(lib, 14)
    lens = [12, 13, 5]
    table = world.table(lens)
    bad = torch.randn(30, 2, 64)
    bad[25:] = math.nan  # the third request's own tokens
    world.fill(table, lens, k=bad, v=bad)
    q = world.query(3)
    lens_B = world.ints(lens)
    for out, lse in (
        lib.decode(q, world.cache, table, lens_B),
        lib.decode(q, world.cache, table, lens_B, starts(world, 1, 1, 1)),
        lib.prefill(q, world.cache, table, lens_B, starts(world, 1, 1, 1)),
    ):
        assert out[:2].isfinite().all() and lse[:2].isfinite().all()
        assert out[2].isnan().all()
