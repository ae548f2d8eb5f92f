"""Conformance lines 3, 4, 14, 15, 23, 25, 28 with masks, scores and sinks: small inputs, answers by hand.

Every registered mask is shown one-hot rows of V: the keys that a query sees can be read off its output.
"""

from __future__ import annotations

import functools
import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.reference import Terms
from kvgen.variants import definitions
from kvgen.variants.samples import sample_params
from tests.conformance.conftest import Build
from tests.support.bundle import prepare
from tests.support.compare import assert_attention
from tests.support.engines import CPU_ROWS, engine_params, library
from tests.support.oracle import OracleLibrary
from tests.support.specs import make_spec
from tests.support.variants import placed, variant_spec
from tests.support.world import World

LOG2E = math.log2(math.e)
MASKS = [d.name for d in definitions("mask")]


def with_keys(spec: Spec, **keys: Any) -> Spec:
    """The spec with more keys of [attention]."""
    raw = spec.to_dict()
    return load_spec({**raw, "attention": {**raw["attention"], **keys}})


def one_hot_spec(mask: str) -> Spec:
    """One KV head and rows as wide as the longest request is long."""
    return variant_spec(mask, format_k="f32", format_v="f32", page_size=8, kv_heads=1, group=2)


def capped(cap: float) -> Spec:
    return with_keys(make_spec("f32", "f32", page_size=4, kv_heads=1, group=2, head_dim=128), soft_cap=cap)


def freed_spec(mask: str) -> Spec:
    return variant_spec(mask, format_k="bf16", format_v="bf16", page_size=8, kv_heads=2, group=2)


def split_spec(mask: str) -> Spec:
    return variant_spec(mask, format_k="f32", format_v="f32", page_size=64, kv_heads=1, group=2)


SINK = with_keys(make_spec("f32", "f32", kv_heads=1, group=2, page_size=16), sink_logit=True)
NOTHING = variant_spec("document", "soft_cap", sink=True, format_k="f32", format_v="f32", kv_heads=1, group=2)
CAPS, FREED, SPLIT_MASKS = (20.0, 1e-3), ("chunk", "kv_first"), ("chunk", "document", "kv_first", "window")
SPECS: list[tuple[Spec, int | None, str]] = [
    *((one_hot_spec(mask), None, "multi prefill") for mask in MASKS),
    *((capped(cap), None, "single prefill") for cap in CAPS),
    *((freed_spec(mask), None, "single multi prefill") for mask in FREED),
    *((split_spec(mask), 256, "multi") for mask in SPLIT_MASKS),
    (SINK, None, "single multi prefill"),
    *((SINK, split, "single multi") for split in (256, 1024)),
    (NOTHING, None, "single"),
]
"""Every spec of this file with its split and what is launched: all compile in one translation unit."""


@pytest.fixture(params=engine_params(("oracle", "avx512-bf16", "portable", "interpret")))
def engine(request: pytest.FixtureRequest) -> str:
    """Name of the engine a test runs on; the other rows have ``test_variants``."""
    return str(request.param)


@functools.cache
def compile_all(row: str) -> None:
    """Compile what the tests of this file launch on a row of the CPU."""
    known = {"single": ("decode", "single"), "multi": ("decode", "multi"), "prefill": ("prefill", "")}
    prepare(
        (library_of(row, spec, split), [("append", "f32"), *(known[word] for word in words.split())])
        for spec, split, words in SPECS
    )


def library_of(engine: str, spec: Spec, split: int | None) -> Any:
    return library(engine, spec, None if split is None else {"decode": {"split_tokens": split}})


@pytest.fixture
def build(engine: str) -> Build:
    """``build(spec, split)``, as in conftest, from one bundle."""
    if engine in CPU_ROWS:
        compile_all(engine)
    return lambda spec, split=None: library_of(engine, spec, split)


def ints(world: World, lens: list[int]) -> torch.Tensor:
    return world.ints([0, *accumulate(lens)])


def filled(lib: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[World, torch.Tensor, torch.Tensor]:
    """A world whose only request holds these rows; its table and length."""
    world = World(lib, -(-len(k) // lib.spec.cache.page_size) + 2)
    table = world.table([len(k)])
    world.fill(table, [len(k)], k=k, v=v)
    return world, table, world.ints([len(k)])


@pytest.mark.parametrize("mask", MASKS)
def test_line_23_each_mask_shows_exactly_its_keys(engine: str, build: Build, mask: str) -> None:
    """V of a key is a one-hot of its position, K and q are 0: what a query sees is what is not 0."""
    spec = one_hot_spec(mask)
    lib, lens, q_lens = build(spec), [54, 3, 0, 17], [6, 5, 2, 1]
    if engine == "interpret":
        lens, q_lens = lens[:2], q_lens[:2]
    world = World(lib, 14)
    table, starts = world.table(lens), [0, *accumulate(q_lens)]
    slots = world.slots(table, lens)
    v = torch.zeros(len(slots), 1, 64)
    v[range(len(slots)), 0, [t for n in lens for t in range(n)]] = 1
    world.fill(table, lens, k=torch.zeros(len(slots), 1, 64), v=v)
    arrays = sample_params(spec, kv_lens=lens, q_starts=starts, rng=np.random.default_rng(5))
    params = placed(world, arrays)
    q = world.tensor(torch.zeros(starts[-1], 2, 64))
    args = (q, world.cache, table, world.ints(lens), ints(world, q_lens))
    results = [lib.decode(*args, params=params), lib.prefill(*args, params=params)]
    for b, (first, count, length) in enumerate(zip(starts, q_lens, lens, strict=False)):
        seen = np.broadcast_to(
            Terms(spec.attention, arrays).visible(b, first, count, length), (2, count, length)
        )
        for out, lse in results:
            for i in range(count):
                for head in range(2):
                    keys = np.flatnonzero(seen[head, i])
                    row = out[first + i, head]
                    where = f"request {b}, query {i}, head {head}"
                    assert row.nonzero().ravel().tolist() == keys.tolist(), where
                    have = float(lse[first + i, head])
                    assert have == pytest.approx(math.log2(len(keys)) if len(keys) else -math.inf), where


@pytest.mark.parametrize("cap", CAPS)
def test_line_25_soft_cap_far_beyond_it(build: Build, cap: float) -> None:
    """Scores of +-46,341 become +-cap: no NaN, and neither key wins by more than the cap lets it."""
    lib = build(capped(cap))
    k = torch.stack([torch.full((1, 128), 64.0), torch.full((1, 128), -64.0)])
    v = torch.stack([torch.ones(1, 128), torch.zeros(1, 128)])
    world, table, lens = filled(lib, k, v)
    q = world.tensor(torch.full((1, 2, 128), 64.0))
    for out, lse in (
        lib.decode(q, world.cache, table, lens),
        lib.prefill(q, world.cache, table, lens, ints(world, [1])),
    ):
        share = 1 / (1 + math.exp(-2 * cap))
        torch.testing.assert_close(out.double(), torch.full_like(out, share).double(), rtol=1e-5, atol=0)
        total = cap * LOG2E + math.log2(1 + math.exp(-2 * cap))
        torch.testing.assert_close(lse.double(), torch.full_like(lse, total).double(), rtol=1e-5, atol=1e-6)


class TestSink:
    def test_line_03_rows_without_keys(self, build: Build) -> None:
        """34 queries and one key of logit 0: rows that see nothing are (0, sink), the last shares with it."""
        lib = build(SINK)
        world, table, lens = filled(lib, torch.zeros(1, 1, 64), torch.ones(1, 1, 64))
        sinks = torch.tensor([-3.0, 2.0])
        q = world.tensor(torch.zeros(34, 2, 64))
        for op in ("decode", "prefill"):
            call, given = getattr(lib, op), (q, world.cache, table, lens, ints(world, [34]))
            out, lse = call(*given, params={"sink_logit": world.tensor(sinks)})
            assert (out[:33] == 0).all()
            torch.testing.assert_close(lse[:33].double(), (sinks * LOG2E).expand(33, 2).double())
            share = 1 / (1 + sinks.double().exp())
            torch.testing.assert_close(out[33].double(), share[:, None].expand(2, 64), rtol=1e-6, atol=0)
            torch.testing.assert_close(lse[33].double(), -share.log2(), rtol=1e-6, atol=1e-6)

    def test_line_04_once_however_often_the_keys_are_cut(self, engine: str, build: Build) -> None:
        split, kv = (128, 300) if engine == "interpret" else (256, 900)
        found = []
        for lib in (build(SINK, split), build(SINK, 1024)):
            k, v = (torch.randn(kv, 1, 64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
            world, table, lens = filled(lib, k, v)
            params = {"sink_logit": world.tensor(torch.tensor([7.0, -1.0]))}
            q = world.tensor(torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(3)))
            args = (q, world.cache, table, lens, ints(world, [2]))
            got = lib.decode(*args, params=params)
            assert_attention(got, OracleLibrary(lib.spec).decode(*args, params=params), "f32")
            single = lib.decode(q[1:], world.cache, table, lens, params=params)
            assert_attention(single, (got[0][1:].double(), got[1][1:].double()), "f32")
            found.append(got)
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("sink", [-math.inf, -1e5, 1e5])
    def test_line_01_extreme_sinks(self, build: Build, sink: float) -> None:
        """A sink of no weight changes nothing; one of all the weight leaves 0, and its own logit."""
        lib = build(SINK)
        k, v = torch.full((3, 1, 64), -64.0), torch.ones(3, 1, 64)
        world, table, lens = filled(lib, k, v)
        q = world.tensor(torch.full((1, 2, 64), 64.0))
        logit = -64.0 * 64 * 64 * 64**-0.5
        for op, more in (("decode", ()), ("prefill", (ints(world, [1]),))):
            params = {"sink_logit": world.tensor(torch.full((2,), sink))}
            out, lse = getattr(lib, op)(q, world.cache, table, lens, *more, params=params)
            keys = (logit + math.log(3)) * LOG2E
            assert (out == (1 if sink < logit else 0)).all()
            expected = max(keys, sink * LOG2E)
            torch.testing.assert_close(
                lse.double(), torch.full_like(lse, expected).double(), rtol=1e-6, atol=0
            )


@pytest.mark.parametrize("mask", SPLIT_MASKS)
def test_line_28_more_splits_than_tokens_that_are_seen(build: Build, mask: str) -> None:
    """Splits that no query sees write nothing, and the merge reads nothing of them."""
    spec = split_spec(mask)
    lib, lens, q_lens = build(spec, 256), [1500, 3, 0, 515], [2, 1, 1, 5]
    world = World(lib, 36)
    table, starts = world.table(lens), [0, *accumulate(q_lens)]
    world.fill(table, lens)
    arrays = sample_params(spec, kv_lens=lens, q_starts=starts, rng=np.random.default_rng(6))
    if mask == "kv_first":
        arrays["kv_first"] = np.array([1496, 3, 0, 300], np.int32)
    params = placed(world, arrays)
    args = (world.query(starts[-1]), world.cache, table, world.ints(lens), ints(world, q_lens))
    got = lib.decode(*args, **world.outputs(starts[-1]), params=params)
    assert_attention(got, OracleLibrary(spec).decode(*args, params=params), "f32")


@pytest.mark.parametrize("mask", FREED)
def test_line_23_freed_pages_that_nobody_sees_are_not_touched(engine: str, build: Build, mask: str) -> None:
    """Pages before what the mask shows were given back: they hold poison, and have no ids in the table."""
    spec = freed_spec(mask)
    lib, length, rows = build(spec), 200, 5
    first = {"chunk": 160, "kv_first": 150}[mask]  # chunks of 40 positions in the example
    world = World(lib, 26)
    table = world.table([length])
    freed = first // 8
    slots = [int(table[0, t // 8]) * 8 + t % 8 for t in range(freed * 8, length)]
    lib.append(world.cache, *(world.normal(len(slots), 2, 64) for _ in "kv"), world.ints(slots, torch.int64))
    if engine != "oracle":
        table[0, :freed] = 2**31 - 1
    params = {"kv_first": world.ints([first])} if mask == "kv_first" else None
    q, lens = world.query(rows), world.ints([length])
    args = (q, world.cache, table, lens, ints(world, [rows]))
    results = [lib.prefill(*args, params=params), lib.decode(*args, params=params)]
    single = lib.decode(q[rows - 1 :], world.cache, table, lens, params=params)
    table[0, :freed] = 0
    want = OracleLibrary(spec).prefill(*args, params=params)
    assert want[0].isfinite().all()
    for got in results:
        assert_attention(got, want, "f32")
    assert_attention(single, (want[0][rows - 1 :], want[1][rows - 1 :]), "f32")


@pytest.fixture
def masked(build: Build, engine: str) -> tuple[Any, World, dict[str, Any]]:
    """A spec with a boolean mask, and right arguments of a decode of two requests."""
    if engine == "oracle":
        pytest.skip("the oracle checks no arguments")
    spec = one_hot_spec("bool_mask")
    lib = build(spec)
    world = World(lib, 5)
    table = world.table([17, 5])
    world.fill(table, [17, 5])
    arrays = sample_params(spec, kv_lens=[17, 5], q_starts=[0, 2, 3], rng=np.random.default_rng(0))
    given = {
        "q": world.query(3),
        "table": table,
        "lens": world.ints([17, 5]),
        "starts": world.ints([0, 2, 3]),
        "params": placed(world, arrays),
    }
    return lib, world, given


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"table": lambda t: t.long()}, r"page_table: .*int64.*\.int\(\)"),
        ({"lens": lambda t: torch.tensor([26 * 8, 5], dtype=torch.int32)}, "kv_lens"),
        ({"lens": lambda t: torch.tensor([-1, 5], dtype=torch.int32)}, "kv_lens"),
        ({"starts": lambda t: torch.tensor([0, 2, 4], dtype=torch.int32)}, "q_starts"),
        ({"q": lambda t: t[:2]}, "q_starts"),
        ({"q": lambda t: t[:, :1]}, "q: shape"),
        ({"params": lambda p: {"bool_mask": p["bool_mask"][:2]}}, r"params\['bool_mask'\]: shape"),
        ({"params": lambda p: {"bool_mask": p["bool_mask"][:, :2]}}, r"params\['bool_mask'\]: shape"),
        ({"params": lambda p: {"bool_mask": p["bool_mask"].float()}}, r"params\['bool_mask'\]: "),
        ({"params": lambda p: {}}, r"params\['bool_mask'\]: missing"),
        ({"params": lambda p: {**p, "mask": p["bool_mask"]}}, r"params\['mask'\]: this op reads no such"),
        ({"params": lambda p: None}, r"params\['bool_mask'\]: missing"),
    ],
)  # fmt: skip
def test_line_14_and_15_what_does_not_fit_is_refused(
    masked: tuple[Any, World, dict[str, Any]], change: dict[str, Any], says: str
) -> None:
    """Never reinterpreted: int64 tables, lengths beyond the table, rows of no request, masks too small."""
    lib, world, given = masked
    changed = {name: change.get(name, lambda same: same)(value) for name, value in given.items()}
    params = changed.pop("params")
    q, table, lens, starts = changed.values()
    for op in ("decode", "prefill"):
        with pytest.raises(ArgumentError, match=says):
            getattr(lib, op)(q, world.cache, table, lens, starts, params=params)


def test_line_14_no_keys_beside_a_table_full_of_pages(build: Build) -> None:
    """A length of 0 is legal whatever the table lists: nothing is read."""
    spec = variant_spec(
        "document", "soft_cap", sink=True, format_k="f32", format_v="f32", kv_heads=1, group=2
    )
    lib = build(spec)
    world = World(lib, 4)
    table, lens = world.ints([2, 1]).reshape(2, 1), world.ints([0, 0])
    arrays = sample_params(spec, kv_lens=[0, 0], q_starts=[0, 1, 2], rng=np.random.default_rng(0))
    params = placed(world, arrays)
    out, lse = lib.decode(world.query(2), world.cache, table, lens, params=params)
    assert (out == 0).all()
    want = torch.from_numpy(arrays["sink_logit"]).double() * LOG2E
    torch.testing.assert_close(lse.double(), want.expand(2, 2), rtol=1e-6, atol=1e-6)
