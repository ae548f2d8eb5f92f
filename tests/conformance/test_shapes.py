"""Conformance lines 9 to 13, 21, 23, 26, 28: groups, windows, splits, head dims, page sizes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kvgen.errors import SpecError
from tests.conformance.conftest import Build
from tests.support.compare import assert_attention
from tests.support.engines import CPU_ROWS, engine_params, library
from tests.support.oracle import OracleLibrary
from tests.support.specs import make_spec
from tests.support.world import World


def check(lib: object, lens: list[int], q_lens: list[int], *ops: str, seed: int = 0) -> None:
    """The ops on random requests against the oracle, in poisoned outputs."""
    world = World(lib, sum(-(-n // lib.spec.cache.page_size) for n in lens) + 3, seed=seed)
    table, lens_B = world.table(lens), world.ints(lens)
    world.fill(table, lens)
    q_starts = world.ints([0, *accumulate(q_lens)])
    q = world.query(sum(q_lens))
    want = OracleLibrary(lib.spec).prefill(q, world.cache, table, lens_B, q_starts)
    for op in ops:
        got = getattr(lib, op)(q, world.cache, table, lens_B, q_starts, **world.outputs(len(q)))
        assert_attention(got, want, lib.spec.attention.q_dtype)


@pytest.mark.parametrize("split", [None, 256], ids=["default", "split-256"])
def test_line_09_group_of_seven(build: Build, split: int | None) -> None:
    lib = build(make_spec("f32", "f32", kv_heads=4, group=7, head_dim=128), split)
    check(lib, [300, 20], [5, 3], "decode", "prefill")


def test_line_10_bidirectional_window_under_split(engine: str, build: Build) -> None:
    small = engine == "interpret"
    window, kv, q = (70, 400, 12) if small else (333, 4096, 300)
    spec = make_spec("f32", "f32", kv_heads=2, group=4, head_dim=128, mask=(False, window))
    check(build(spec, 256), [kv], [q], "decode", "prefill")


@pytest.mark.parametrize(
    ("head_dim", "formats"),
    [(72, ("bf16", "bf16")), (80, ("f16", "f32")), (96, ("int8-token", "int8-head"))],
)
def test_line_11_odd_head_dims(build: Build, head_dim: int, formats: tuple[str, str]) -> None:
    """Rows are packed (align 1), so what lies behind a row is the next one and not padding."""
    spec = make_spec(*formats, kv_heads=2, group=3, head_dim=head_dim, q_dtype="bf16", align=1)
    check(build(spec), [54], [3], "decode", "prefill")


@pytest.mark.parametrize("page_size", [256, 512])
def test_line_12_pages_above_the_tile(build: Build, page_size: int) -> None:
    lib = build(make_spec("f32", "f32", page_size=page_size, kv_heads=1, group=2))
    check(lib, [300, 1], [4, 1], "decode", "prefill")


def test_line_13_surplus_page_at_a_page_boundary(build: Build) -> None:
    """Length 16 with pages of 16 tokens and two pages listed: the second is poison."""
    lib = build(make_spec("f32", "f32", page_size=16, kv_heads=1, group=1))
    world = World(lib, 3)
    table, lens = world.ints([1, 2]).reshape(1, 2), world.ints([16])
    world.fill(table, [16], v=torch.arange(16.0).reshape(16, 1, 1).repeat(1, 1, 64))
    q = world.tensor(torch.zeros(1, 1, 64))
    out, lse = lib.decode(q, world.cache, table, lens)
    torch.testing.assert_close(out.float(), torch.full((1, 1, 64), 7.5))
    torch.testing.assert_close(lse.float(), torch.full((1, 1), 4.0))


@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_line_21_longest_query_equals_longest_request(row: str) -> None:
    """{q 1000, kv 1000} beside {q 100, kv 500}: the second sees its 400 cached keys."""
    lib = library(row, make_spec("f32", "f32", kv_heads=2, group=4))
    check(lib, [1000, 500], [1000, 100], "prefill")


class TestLine23Window:
    def test_freed_pages_outside_are_not_touched(self, engine: str, build: Build) -> None:
        """Pages wholly before the window are poison and, for kernels, no longer in the table."""
        lib = build(make_spec("bf16", "bf16", page_size=16, kv_heads=2, group=2, mask=(True, 128)))
        world = World(lib, 25)
        table = world.table([300])
        live = 300 - 8 - 128  # the first key that the first of 8 queries sees
        freed = live // 16
        tokens = range(freed * 16, 300)
        slots = [int(table[0, t // 16]) * 16 + t % 16 for t in tokens]
        rows = (world.normal(len(slots), 2, 64) for _ in "kv")
        lib.append(world.cache, *rows, world.ints(slots, torch.int64))
        if engine != "oracle":
            table[0, :freed] = 2**31 - 1
        q, lens, q_starts = world.query(8), world.ints([300]), world.ints([0, 8])
        results = [
            lib.prefill(q, world.cache, table, lens, q_starts, **world.outputs(8)),
            lib.decode(q, world.cache, table, lens, q_starts, **world.outputs(8)),
        ]
        table[0, :freed] = 0
        want = OracleLibrary(lib.spec).prefill(q, world.cache, table, lens, q_starts)
        for got in results:
            assert_attention(got, want, "f32")
        single = lib.decode(q[7:], world.cache, table, lens)
        assert_attention(single, (want[0][7:], want[1][7:]), "f32")

    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
    def test_the_edge_is_exact(self, build: Build, causal: bool) -> None:
        """V of a key is a one-hot of its position: a query sees exactly w earlier keys and its own."""
        w = 20
        spec = make_spec("f32", "f32", page_size=8, kv_heads=1, group=1, mask=(causal, w))
        lib = build(spec)
        world = World(lib, 8)
        lens, table = [40], world.table([40])
        v = torch.zeros(40, 1, 64)
        v[range(40), 0, range(40)] = 1
        world.fill(table, lens, k=torch.zeros(40, 1, 64), v=v)
        q = world.tensor(torch.zeros(10, 1, 64))
        for out, _ in (
            lib.prefill(q, world.cache, table, world.ints(lens), world.ints([0, 10])),
            lib.decode(q, world.cache, table, world.ints(lens), world.ints([0, 10])),
        ):
            for i in range(10):
                position = 30 + i
                seen = set(range(position - w, (position if causal else 39) + 1))
                assert set(out[i, 0].nonzero().ravel().tolist()) == seen


@pytest.mark.parametrize("group", [5, 32, 71])
def test_line_26_any_group(build: Build, group: int) -> None:
    lib = build(make_spec("f32", "f32", kv_heads=1, group=group))
    check(lib, [37], [2], "decode", "prefill")


def test_line_26_head_dims_work_or_are_refused(build: Build) -> None:
    with pytest.raises(SpecError, match=r"head_dim = 13: (outside|not a multiple of 8)"):
        make_spec(head_dim=13)
    check(build(make_spec("bf16", "bf16", head_dim=24, kv_heads=1)), [37], [2], "decode", "prefill")


def test_line_28_more_splits_than_tokens_in_the_window(build: Build) -> None:
    """Splits before the window write nothing, and the merge reads nothing of them."""
    spec = make_spec("f32", "f32", page_size=64, kv_heads=1, group=2, mask=(True, 8))
    lib = build(spec, 256)
    check(lib, [1500, 3, 0], [2, 1, 1], "decode")
    check(lib, [515], [5], "decode")  # the window crosses from one split into the next
