"""Conformance lines 16, 17, 24 and 27 for floats of eight and four bits: given scales, blocks, every code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.support.compare import assert_attention, differences
from tests.support.engines import engine_params, library
from tests.support.oracle import OracleLibrary
from tests.support.world import World

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = {"k": torch.tensor(0.25), "v": torch.tensor([0.5, 0.5])}
LENS = [40, 23]
"""Two requests that share their first page."""


@pytest.fixture(params=engine_params(("avx2", "interpret")))
def build(request: pytest.FixtureRequest) -> Callable[[Spec], Any]:
    """One row of the CPU backend, and the interpreter: base grids and tests of bits take the other rows."""
    return lambda spec: library(str(request.param), spec)


def make(k: dict[str, Any], v: dict[str, Any], head_dim: int = 64) -> Spec:
    """Two KV heads, four query heads, no causal mask: every query sees every key."""
    attention = {
        "q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "q_dtype": "f32", "causal": False,
    }  # fmt: skip
    return load_spec({"attention": attention, "cache": {"page_size": 16, "k": k, "v": v}})


def static(name: str) -> Spec:
    """Both sides in one float format: K with a scale per tensor, V with one per head."""
    return make({"format": name, "group": {}}, {"format": name, "group": {"head": 1}})


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[Any, Any]:
    """(out, lse) in f64, the LSE in base 2: q [rows, q_heads, d], k and v [keys, kv_heads, d]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("rhd,khd->rhk", q.double(), k) * scale
    return torch.einsum("rhk,khd->rhd", scores.softmax(-1), v), scores.logsumexp(-1) / math.log(2)


class Exact:
    """A batch whose numbers a format holds without a loss, appended by the library under test."""

    def __init__(self, lib: Any, scales: dict[str, torch.Tensor]) -> None:
        self.lib, self.world = lib, World(lib, 6, scales=scales)
        self.table = self.world.table(LENS, shared=True)
        generator = torch.Generator().manual_seed(3)
        self.k, self.v = (
            torch.randint(-7, 8, (47, 2, 64), generator=generator) * scales[side].reshape(-1, 1)
            for side in "kv"
        )
        self.world.fill(self.table, LENS, k=self.k, v=self.v)
        self.lens = self.world.ints(LENS)

    def keys(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each request."""
        return [x[:40], torch.cat([x[:16], x[40:]])]

    def want(self, q: torch.Tensor, starts: list[int], scale: float) -> tuple[Any, Any]:
        parts = [
            exact(q[starts[b] : starts[b + 1]], k, v, scale)
            for b, (k, v) in enumerate(zip(self.keys(self.k), self.keys(self.v), strict=True))
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def calls(self, op: str, scale: float | None) -> None:
        """One op with outputs of the caller's and with its own, against ``exact``."""
        counts = {"decode": [1, 1], "several": [3, 2], "prefill": [17, 5], "cascade": [1, 1]}[op]
        starts = [0, counts[0], sum(counts)]
        q, cut = self.world.query(starts[-1]), self.world.ints(starts)
        given: tuple[Any, ...] = (q, self.world.cache, self.table, self.lens)
        if op == "cascade":
            own = self.world.tensor(self.table[:, 1:].contiguous())
            prefix = self.world.tensor(self.table[0, :1])
            given = (q, self.world.cache, prefix, 16, own, self.world.ints([n - 16 for n in LENS]))
        elif op != "decode":
            given = (*given, cut)
        run = getattr(self.lib, "decode" if op == "several" else op)
        want = self.want(q, starts, scale or self.lib.spec.attention.scale)
        for outputs in ({}, self.world.outputs(starts[-1])):
            assert_attention(run(*given, **outputs, scale=scale), want, "f32")


@pytest.mark.parametrize("op", ["decode", "several", "prefill"])
def test_line_16_e4m3_with_given_scales_equals_the_plain_result(build: Any, op: str) -> None:
    """K over 0.25 and V over 0.5 as e4m3, scales per tensor and per head: nothing is lost on the way."""
    batch = Exact(build(static("e4m3")), SCALES)
    batch.calls(op, None)
    got = batch.lib.gather(batch.world.cache, batch.table, batch.lens)
    for have, rows in zip(got, (batch.k, batch.v), strict=True):
        assert torch.equal(have.float(), torch.cat(batch.keys(rows)))


@pytest.mark.parametrize(
    ("name", "op"),
    [("e4m3", "cascade"), *((name, op) for name in FLOAT8 for op in ("decode", "several", "prefill"))],
)
def test_line_24_every_factor_applies_on_every_path(build: Any, name: str, op: str) -> None:
    """The factors of K, of V's heads and the call's own, all different."""
    scales = {"k": torch.tensor(0.5), "v": torch.tensor([0.25, 2.0])}
    Exact(build(static(name)), scales).calls(op, 0.75 * 0.125)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_line_17_blocks_of_fp4(build: Any, head_dim: int) -> None:
    """mxfp4 and nvfp4 on either side: the bytes of append, then every reader, against the oracle."""
    names = ("mxfp4", "nvfp4") if head_dim == 64 else ("nvfp4", "mxfp4")
    lib = build(make({"format": names[0]}, {"format": names[1]}, head_dim))
    world, lens = World(lib, 6), [0, 1, 15, 33]
    table, lens_B = world.table(lens), world.ints(lens)
    world.fill(table, lens)
    oracle = OracleLibrary(lib.spec)
    pairs = zip(*(x.gather(world.cache, table, lens_B) for x in (lib, oracle)), strict=True)
    for name, (got, want) in zip(names, pairs, strict=True):
        # Kernels round the product of nvfp4's two scales to f32, the oracle multiplies them in f64.
        tolerance = 2.0**-23 if name == "nvfp4" else 0.0
        assert not (found := differences("gather", got, want, tolerance)), found
    several = world.ints([0, 3, 4, 6, 11])
    for op, rows, cut in (("decode", 4, ()), ("decode", 11, (several,)), ("prefill", 11, (several,))):
        q = world.query(rows)
        want = oracle.decode(q, world.cache, table, lens_B, *cut)
        assert_attention(getattr(lib, op)(q, world.cache, table, lens_B, *cut), want, "f32")


@pytest.mark.parametrize("name", list(FLOAT8))
def test_line_27_every_code_of_eight_bits_reads_back(build: Any, name: str) -> None:
    """All 256 codes: through gather on both sides, as V through decode, as K through its logsumexp."""
    lib = build(static(name))
    world = World(lib, 5, scales=SCALES)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(4, 1, 64).expand(4, 2, 64)
    values = codes.contiguous().view(FLOAT8[name]).float()
    planes = [plane.view(torch.uint8) for plane in (world.cache.k, world.cache.v)]
    table, lens = world.table([1] * 4), world.ints([1] * 4)
    pages = table[:, 0].long()
    for plane in planes:
        plane[pages, :, 0] = codes
    for got, scale in zip(lib.gather(world.cache, table, lens), (0.25, 0.5), strict=True):
        assert not (found := differences("gather", got.float(), values * scale, 0.0)), found
    planes[0][pages, :, 0] = 0
    out, _ = lib.decode(world.query(4), world.cache, table, lens)
    want = (values * 0.5).where(~values.isinf(), torch.nan).repeat_interleave(2, 1)  # docs/numerics.md
    assert not (found := differences("decode", out, want, 0.0)), found
    # One key a request and queries of one element each: the logsumexp is that element of K.
    finite = values.isfinite()
    planes[0][pages, :, 0] = torch.where(finite, codes, 0)
    planes[1][pages, :, 0] = 0
    q = world.tensor(torch.eye(64).reshape(16, 4, 64).repeat(4, 1, 1))
    _, lse = lib.decode(q, world.cache, table, lens, world.ints([0, 16, 32, 48, 64]), scale=1.0)
    want = torch.where(finite, values * 0.25, 0.0).double() / math.log(2)
    assert not (found := differences("lse", lse, want[:, 0].reshape(64, 4), 2e-5)), found


def same_bytes(lib: Any, scales: dict[str, torch.Tensor], rows: torch.Tensor) -> World:
    """Append rows [n, 2, d] to both sides by ``lib`` and by the oracle: all bytes are equal."""
    world = World(lib, -(-len(rows) // 16) + 1, scales=scales)
    before, slots = world.snapshot(), torch.arange(len(rows))
    lib.append(world.cache, world.tensor(rows), world.tensor(rows), world.tensor(slots))
    got = world.snapshot()
    for pool, flat in before.items():
        world.bytes[pool][:] = flat
    OracleLibrary(lib.spec).append(world.cache, rows, rows, slots)
    for pool, at in world.changed(got).items():
        assert not len(at), f"{len(at)} bytes of pool {pool} differ from the oracle's, first {at[0]}"
    return world


@pytest.mark.parametrize("name", list(FLOAT8))
def test_line_27_writers_of_eight_bits_agree(build: Any, name: str) -> None:
    """Codes, the middles between them, what saturates and NaN: the oracle's bytes, and torch's codes."""
    dtype = FLOAT8[name]
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).double()
    finite = every[every.isfinite()].unique()
    top = float(finite.max())
    odd = torch.tensor([0.0, -0.0, top * 1.05, -top * 1.05, top * 9, 1e30, math.nan, 1e-30]).double()
    row = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, odd])
    row = torch.nn.functional.pad(row, (0, -len(row) % 64)).float()
    rows = (row * 0.25).reshape(-1, 1, 64).expand(-1, 2, 64).contiguous()
    world = same_bytes(build(static(name)), {"k": torch.tensor(0.25), "v": torch.tensor([0.25, 0.25])}, rows)
    want = row.clamp(-top, top).to(dtype).float().reshape(-1, 64)
    stored = world.cache.k[:, 0].float().reshape(-1, 64)[: len(want)]
    assert not (found := differences("codes", stored, want, 0.0)), found


def test_line_27_writers_of_four_bits_agree(build: Any) -> None:
    """Ties to even, a largest magnitude that saturates, zeros, NaN and inf in blocks of e2m1."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    both = [*ties, *(-x for x in ties)]
    blocks = [
        both,
        [*both[:-1], -7.0],
        [0.0] * 16,
        [*both[:-1], math.nan],
        [*both[:-1], math.inf],
        [1e-40] * 16,
    ]
    rows = torch.tensor([block * 4 for block in blocks])[:, None].expand(-1, 2, 64).contiguous()
    lib = build(make({"format": "mxfp4"}, {"format": "nvfp4"}))
    world = same_bytes(lib, {"v": torch.tensor(1.0)}, rows)
    got = OracleLibrary(lib.spec).gather(world.cache, torch.tensor([[0]]), torch.tensor([1]))
    for side in got:
        assert side[0, 0, :16].tolist() == [*want, *(-x for x in want)]
