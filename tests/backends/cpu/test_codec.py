"""Codes on the CPU: every code of the small formats read back, every kind of number stored as by the oracle.

All rows of the ISA must leave the same bytes, whatever they have instructions for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.reference import view
from kvgen.reference.codec import e4m3_to_f64
from tests.support.bundle import prepare
from tests.support.compare import differences
from tests.support.engines import CPU_ROWS, cpu_library, engine_params
from tests.support.oracle import OracleLibrary
from tests.support.specs import LAYOUTS, make_spec
from tests.support.world import World

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOKEN = {"tok": 1, "head": 1}


def of_odd_shape(k: dict[str, Any], v: dict[str, Any], page: int, width: int, v_width: int) -> Spec:
    """K and V of their own width, format and layout, two heads."""
    attention = {"q_heads": 2, "kv_heads": 2, "head_dim": width, "v_head_dim": v_width, "q_dtype": "f32"}
    cache = {"page_size": page, "layout": LAYOUTS["hnd"]["cache"], "align": 1, "k": k, "v": v}
    return load_spec({"name": "odd", "attention": attention, "cache": cache})


ODD = {
    "int4 quads beside e4m3": of_odd_shape(
        {"format": "int4", "group": TOKEN, "layout": "head d/4 tok d%4"},
        {"format": "e4m3", "group": TOKEN, "layout": "head tok/8 d tok%8"}, 16, 72, 40,
    ),
    "blocks in columns": of_odd_shape(
        {"format": "e4m3", "group": {**TOKEN, "d": 16}, "layout": "head d tok"},
        {"format": "int4", "group": {**TOKEN, "d": 32}, "layout": "d/8 head tok d%8"}, 5, 80, 64,
    ),
    "pages of one token": of_odd_shape(
        {"format": "int4", "group": TOKEN, "layout": "d/2 tok head d%2"},
        {"format": "f16", "layout": "head d tok"}, 1, 40, 72,
    ),
    "pairs": of_odd_shape(
        {"format": "bf16", "layout": "head d/2 tok d%2"},
        {"format": "int8", "group": TOKEN, "layout": "head tok/4 d tok%4"}, 64, 24, 16,
    ),
}  # fmt: skip
STORED = ("e4m3-tensor", "e4m3-block", "int4-head", "int4-token", "int4-block")
FOUND = ("int8-token", "int8-block", "int4-token", "e4m3-token", "e4m3-block")
GIVEN = ("int8-head", "int4-head", "e4m3-tensor")
READ = {
    (name, layout): make_spec(name, name, layout, page_size=256, kv_heads=1, head_dim=64)
    for name in STORED
    for layout in ("hnd", "quads")
}
WRITTEN = {name: make_spec(name, name, page_size=16, kv_heads=1, head_dim=80) for name in (*FOUND, *GIVEN)}


@pytest.fixture(scope="module", params=engine_params(CPU_ROWS[1:]))
def libraries(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every spec of this file on one ISA row, compiled together; bf16 pairs do not matter here."""
    found = {spec.hash: cpu_library(spec, request.param) for spec in (*ODD.values(), *READ.values())}
    found |= {spec.hash: cpu_library(spec, request.param) for spec in WRITTEN.values()}
    every = [(op, dtype) for op in ("append", "gather") for dtype in FLOATS]
    wanted = {spec.hash: every for spec in ODD.values()}
    wanted |= {spec.hash: every[3:] for spec in READ.values()}
    wanted |= {spec.hash: [("append", "f32")] for spec in WRITTEN.values()}
    prepare((found[key], kernels) for key, kernels in wanted.items())
    return found


def gathered(world: World, lens: list[int], table: torch.Tensor) -> list[str]:
    """What ``gather`` reads otherwise than the oracle, in every type."""
    found = []
    for dtype in FLOATS.values():
        got = world.lib.gather(world.cache, table, world.ints(lens), dtype=dtype)
        want = OracleLibrary(world.spec).gather(world.cache, table, world.ints(lens), dtype=dtype)
        for side, a, b in zip("kv", got, want, strict=True):
            found += differences(f"gather {side} as {dtype}", a, b, 0.0)
    return found


def appended(world: World, k: torch.Tensor, v: torch.Tensor, slots: list[int]) -> list[str]:
    """Bytes that ``append`` leaves otherwise than the oracle; a NaN scale has one form, so they are equal."""
    expected, real = world.snapshot(), world.cache.pools
    world.cache.pools = {name: torch.from_numpy(flat) for name, flat in expected.items()}
    OracleLibrary(world.spec).append(world.cache, k, v, torch.tensor(slots))
    world.cache.pools = real
    world.lib.append(world.cache, world.tensor(k), world.tensor(v), world.ints(slots, torch.int64))
    return [f"{name}: {len(at)} bytes" for name, at in world.changed(expected).items() if len(at)]


@pytest.mark.parametrize(("name", "layout"), list(READ))
def test_every_stored_byte_reads_back(libraries: dict[str, Any], name: str, layout: str) -> None:
    """All 256 bytes at every element of a row: all codes of e4m3, all pairs of nibbles, -8 among them."""
    world = World(libraries[READ[name, layout].hash], 1)
    for plane in ("k", "v"):
        stored = view(world.bytes, world.record, plane, 1)  # [page, head, tok, tok, d, d]
        rows, elements = stored.shape[2] * stored.shape[3], stored.shape[4] * stored.shape[5]
        ramp = np.arange(rows)[:, None] + 37 * np.arange(elements)
        stored[0, 0] = (ramp % 256).astype(np.uint8).reshape(stored.shape[2:])
        if world.record.has(f"{plane}_scale"):
            scales = view(world.bytes, world.record, f"{plane}_scale", 1)
            scales[...] = np.linspace(0.25, 3.0, scales.size, dtype=np.float32).reshape(scales.shape)
    assert not (found := gathered(world, [256], world.ints([0]).reshape(1, 1))), found


def odd_numbers(qmax: float, width: int) -> torch.Tensor:
    """Rows whose largest magnitude is ``qmax`` (so that a scale is one), of numbers that are hard to round.

    Every tie between neighbouring codes and the numbers just beside it, subnormal codes and below them.
    """
    codes = e4m3_to_f64(np.arange(127)) if qmax == 448 else np.arange(qmax + 1)
    ties = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(s * np.inf), dtype=np.float32) for s in (-1, 1)]
    tiny = np.array([0.0, 2.0**-10, 2.0**-11, 3 * 2.0**-11, 1e-30, 1e-45], np.float32)
    values = np.concatenate([codes.astype(np.float32), ties, *near, tiny])
    values = np.concatenate([values, -values])
    rows = -(-len(values) // (width - 1))
    full = np.zeros((rows, width), np.float32)
    full[:, 0] = qmax
    full[:, 1:] = np.resize(values, (rows, width - 1))
    return torch.from_numpy(full)


@pytest.mark.parametrize("name", FOUND)
def test_ties_and_subnormals_round_as_in_the_oracle(libraries: dict[str, Any], name: str) -> None:
    rows = odd_numbers({"int8": 127.0, "int4": 7.0, "e4m3": 448.0}[name[:4]], 80)
    rows = torch.cat([rows, rows * 2.0**-60, rows * 0.37])[:, None]
    world = World(libraries[WRITTEN[name].hash], -(-len(rows) // 16))
    assert not (found := appended(world, rows, -rows, list(range(len(rows))))), found


@pytest.mark.parametrize("name", GIVEN)
def test_given_scales_saturate(libraries: dict[str, Any], name: str) -> None:
    """What a given scale is too small for, inf and NaN."""
    rows = odd_numbers({"int8": 127.0, "int4": 7.0, "e4m3": 448.0}[name[:4]], 80)
    rows = torch.cat([rows, rows * 1.07, rows * 1e30])
    rows[:, 5], rows[:, 6], rows[:, 7] = torch.inf, -torch.inf, torch.nan
    rows[:, 8], rows[:, 9] = 3.4e38, -torch.nan
    scale = torch.tensor(1.0) if "tensor" in name else torch.tensor([1.0])
    world = World(libraries[WRITTEN[name].hash], -(-len(rows) // 16), scales={"k": scale, "v": scale * 0.5})
    assert not (found := appended(world, rows[:, None], rows[:, None], list(range(len(rows))))), found


@pytest.mark.parametrize("dtype", list(FLOATS))
@pytest.mark.parametrize("name", list(ODD))
def test_odd_widths_in_every_layout(libraries: dict[str, Any], dtype: str, name: str) -> None:
    """Tails of vectors, permuted tokens, rows with NaN, with inf and of zeros; pools end at a guard page."""
    spec = ODD[name]
    page, att = spec.cache.page_size, spec.attention
    lens = [2 * page + 1, page]
    world = World(libraries[spec.hash], 4)
    table = world.table(lens)
    slots = world.slots(table, lens)
    world.rng.shuffle(slots)
    k, v = (
        world.normal(len(slots), 2, width, dtype=FLOATS[dtype], scale=2.0)
        for width in (att.head_dim, att.v_head_dim)
    )
    k[0, 0, -1], v[0, 1, 3], k[1, 1], v[2] = torch.nan, torch.inf, 0.0, 0.0
    assert not (found := appended(world, k, v, slots)), found
    assert not (found := gathered(world, lens, table)), found


@pytest.mark.parametrize("name", list(ODD))
def test_tokens_that_fill_vectors_together_leave_the_same_bytes(libraries: dict[str, Any], name: str) -> None:
    """Slots in order from the middle of a group, with a gap, a skipped token, and a group in reverse."""
    spec = ODD[name]
    att, page = spec.attention, spec.cache.page_size
    world = World(libraries[spec.hash], -(-64 // page))
    slots = [*range(3, 21), -1, *range(24, 40), *range(47, 39, -1), *range(48, 51), 52, 53, 54]
    for dtype in FLOATS.values():
        k, v = (world.normal(len(slots), 2, width, dtype=dtype) for width in (att.head_dim, att.v_head_dim))
        assert not (found := appended(world, k, v, slots)), found
