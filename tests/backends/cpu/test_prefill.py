"""Prefill on the CPU: panels made of every format and layout, and what a row does not see."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.support.bundle import prepare
from tests.support.compare import assert_attention
from tests.support.engines import CPU_ROWS, cpu_library, engine_params
from tests.support.oracle import OracleLibrary
from tests.support.specs import make_spec
from tests.support.world import HUGE_IDS, World

TOKEN = {"tok": 1, "head": 1}


def of(k: dict[str, Any], v: dict[str, Any], page: int = 16, group: int = 3, **attention: Any) -> Spec:
    """Two KV heads; K and V of their own format and layout."""
    heads = {"q_heads": 2 * group, "kv_heads": 2, "head_dim": 64, "q_dtype": "bf16"}
    cache = {"page_size": page, "layout": "page kv head tok d", "k": k, "v": v}
    return load_spec({"name": "panels", "attention": {**heads, **attention}, "cache": cache})


INT8 = {"format": "int8", "group": TOKEN}
INT4 = {"format": "int4", "group": TOKEN}
E4M3 = {"format": "e4m3", "group": TOKEN}
SPECS = {
    "bf16 rows": of({"format": "bf16"}, {"format": "bf16"}),
    "bf16 pairs, odd widths, window": of(
        {"format": "bf16", "layout": "head d/2 tok d%2"},
        {"format": "bf16", "layout": "head tok/2 d tok%2"},
        page=6, head_dim=72, v_head_dim=40, window=70,
    ),
    "int8 quads": of({**INT8, "layout": "head d/4 tok d%4"}, {**INT8, "layout": "head tok/4 d tok%4"}),
    "int4 quads, blocks": of(
        {"format": "int4", "group": {**TOKEN, "d": 16}, "layout": "head d/4 tok d%4"},
        {"format": "int4", "group": {**TOKEN, "d": 32}, "layout": "head tok/4 d tok%4"},
        head_dim=96, v_head_dim=128,
    ),
    "e4m3 columns": of({**E4M3, "layout": "head d tok"}, {**E4M3, "layout": "head d tok"}, page=5),
    "e4m3 beside f16, both ways": of(
        {"format": "e4m3", "group": {"head": 1}}, {"format": "f16"}, causal=False, window=33, q_dtype="f16"
    ),
    "f32 query, int8 in blocks": of(
        {"format": "int8", "group": {**TOKEN, "d": 16}}, {"format": "int8", "group": {**TOKEN, "d": 48}},
        head_dim=80, v_head_dim=96, q_dtype="f32",
    ),
    "int8 query": of(INT8, {"format": "f32"}, group=8, qk="int8", q_dtype="f32"),
    "int8 query of bf16": of(INT4, INT4, group=1, qk="int8", pv="int8"),
}  # fmt: skip
STORED = ("bf16", "f16", "int8-token", "e4m3-token", "e4m3-block")
ROUGH = {name: make_spec(name, name, page_size=4, kv_heads=1, group=2, q_dtype="bf16") for name in STORED}
WINDOWED = make_spec("bf16", "bf16", page_size=4, kv_heads=1, group=3, mask=(True, 90), q_dtype="bf16")


@pytest.fixture(scope="module", params=engine_params(tuple(r for r in CPU_ROWS if r != "avx512")))
def libraries(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every spec of this file on one ISA row, compiled together."""
    specs = (*SPECS.values(), *ROUGH.values(), WINDOWED)
    found = {spec.hash: cpu_library(spec, request.param) for spec in specs}
    prepare((lib, [("prefill", ""), ("append", "f32")]) for lib in found.values())
    return found


@pytest.mark.parametrize("name", list(SPECS))
def test_every_format_and_layout_becomes_the_right_panels(libraries: dict[str, Any], name: str) -> None:
    """Ragged requests: none, one, part of a tile, several tiles; more queries than keys; several units."""
    spec = SPECS[name]
    lens, q_lens = [300, 0, 17, 1, 600, 5], [37, 2, 17, 5, 180, 9]
    world = World(libraries[spec.hash], sum(-(-n // spec.cache.page_size) for n in lens) + 3)
    table, starts, lens_B = world.table(lens), world.ints([0, *accumulate(q_lens)]), world.ints(lens)
    world.fill(table, lens)
    q = world.query(sum(q_lens))
    got = world.lib.prefill(q, world.cache, table, lens_B, starts, **world.outputs(len(q)))
    want = OracleLibrary(spec).prefill(q, world.cache, table, lens_B, starts)
    assert_attention(got, want, spec.attention.q_dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", STORED)
def test_what_a_row_does_not_see_stays_out_of_it(libraries: dict[str, Any], name: str, value: float) -> None:
    """A key with NaN or inf at an odd and at an even place of its pair, in a tile that is masked."""
    spec = ROUGH[name]
    for at in (40, 41):
        world = World(libraries[spec.hash], 20)
        table, lens = world.table([70]), world.ints([70])
        k, v = torch.randn(70, 1, 64), torch.randn(70, 1, 64)
        v[at, 0, 7] = value
        world.fill(table, [70], k=k, v=v)
        q, starts = world.query(70), world.ints([0, 70])
        got = world.lib.prefill(q, world.cache, table, lens, starts)
        want = OracleLibrary(spec).prefill(q, world.cache, table, lens, starts)
        assert_attention((got[0][:at], got[1][:at]), (want[0][:at], want[1][:at]), "bf16")
        assert not got[0][at:, :, 7].isfinite().any()
        if name in ("bf16", "f16"):  # elsewhere the row of V is lost
            rest = [i for i in range(64) if i != 7]
            assert_attention((got[0][..., rest], got[1]), (want[0][..., rest], want[1]), "bf16")


def test_a_window_gives_the_same_bits_however_a_prompt_is_cut(libraries: dict[str, Any]) -> None:
    """And reads neither the page ids nor the keys before the window of its first query."""
    world = World(libraries[WINDOWED.hash], 130)
    table, lens = world.table([500]), world.ints([500])
    world.fill(table, [500])
    q = world.query(500)
    whole = world.lib.prefill(q, world.cache, table, lens, world.ints([0, 500]))
    want = OracleLibrary(WINDOWED).prefill(q, world.cache, table, lens, torch.tensor([0, 500]))
    assert_attention(whole, want, "bf16")
    for cut in (1, 255, 300, 499):
        freed = table.clone()
        freed[0, : max(0, cut - 90) // 4] = HUGE_IDS[0]
        part = world.lib.prefill(q[cut:], world.cache, freed, lens, world.ints([0, 500 - cut]))
        assert torch.equal(part[0], whole[0][cut:]) and torch.equal(part[1], whole[1][cut:])
