"""Tiles that prefill visits, and blocks of rows that it masks: where there is something to see, or to hide.

Counters are put into the rendered source; what they should say is counted from the mask, pair by pair.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgen.backends.cpu import batch, isa, loader
from kvgen.backends.cpu.job import Job
from kvgen.backends.cpu.kernel import CpuKernel
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.support.bundle import prepare
from tests.support.engines import cpu_library
from tests.support.prefill_calls import PrefillCall

TILE, ROW_BLOCK, Q_TILE, GROUP = 64, 4, 32, 4
PINS = {"prefill": {"tile": TILE, "rows": Q_TILE * GROUP, "row_block": ROW_BLOCK, "prefetch": 0}}
LENS, Q_LENS = [700, 0, 333, 64], [200, 3, 333, 10]
COUNTED = (
    ("        stage_k(a, u, first", "        ++kvgen_counts[0];\n        stage_k(a, u, first"),
    ("attend_block<true>(u,", "++kvgen_counts[1], attend_block<true>(u,"),
    ("attend_block<false>(u,", "++kvgen_counts[2], attend_block<false>(u,"),
    ("  attend_block(u, row", "  ++kvgen_counts[1];\n  attend_block(u, row"),
)
"""What is counted: visited tiles of units, masked blocks of rows, whole ones."""
Sees = Callable[[Any, Any, int, dict[str, Any]], Any]


def of(**attention: Any) -> Spec:
    heads = {"q_heads": 2 * GROUP, "kv_heads": 2, "head_dim": 16, "q_dtype": "f32"}
    cache = {"page_size": 16, "layout": "page kv head tok d", "k": {"format": "f32"}, "v": {"format": "f32"}}
    return load_spec({"name": "tiles", "attention": {**heads, **attention}, "cache": cache})


CASES: dict[str, tuple[Spec, Sees]] = {
    "causal": (of(), lambda q, k, b, p: k <= q),
    "window": (of(window=100), lambda q, k, b, p: (k <= q) & (k >= q - 100)),
    "both ways": (
        of(causal=False, window=50, window_right=20),
        lambda q, k, b, p: (k <= q + 20) & (k >= q - 50),
    ),
    "chunk": (of(chunk=90), lambda q, k, b, p: (k <= q) & (k // 90 == q // 90)),
    "prefix": (
        of(causal=False, prefix_lm=True),
        lambda q, k, b, p: (k <= q) | (k < p["prefix_len"][b]),
    ),
    "kv_first": (of(kv_first=True), lambda q, k, b, p: (k <= q) & (k >= p["kv_first"][b])),
    "document": (
        of(document=True),
        lambda q, k, b, p: (k <= q) & (p["doc_start"][b][k] == p["doc_start"][b][np.maximum(q, 0)]),
    ),
    "all": (of(causal=False), lambda q, k, b, p: (k >= 0) & (q == q)),
}
NEVER_FULL = of(window=100, mask="(kv_pos + q_pos) % 3 != 0")


@pytest.fixture(scope="module")
def counted() -> tuple[dict[str, Any], Any]:
    """Libraries whose prefill counts, and the counters."""
    specs = {name: spec for name, (spec, _) in CASES.items()} | {"never full": NEVER_FULL}
    libs = {name: cpu_library(spec, "portable", PINS) for name, spec in specs.items()}
    prepare((lib, [("append", "f32")]) for lib in libs.values())
    text = 'extern "C" long kvgen_counts[3];\nlong kvgen_counts[3];\n'
    for lib in libs.values():
        source = lib.source("prefill")
        for old, new in COUNTED:
            source = source.replace(old, new)
        text += source
    target = next(iter(libs.values())).target
    flags = (*isa.flags_for(target.arch, target.features), "-w")
    (done,) = batch.compile_many([Job((text,), flags, "-O1", "fast", False, "counted")], workers=1)
    assert done.path is not None, done.message
    loaded = loader.load(done.path)
    for lib in libs.values():
        lib._kernels["prefill", ""] = CpuKernel(lib._plan("prefill", ""), loaded)
    return libs, (ctypes.c_long * 3).from_address(loaded.address("kvgen_counts"))


def expected(sees: Sees, params: dict[str, Any]) -> tuple[int, int, int]:
    """Tiles of units with a key that some query sees; blocks of rows that see a part of a tile; all of it."""
    found = np.zeros(3, np.int64)
    for b, (kv_len, q_len) in enumerate(zip(LENS, Q_LENS, strict=True)):
        q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None, :]
        seen = np.broadcast_to(sees(q, k, b, params), (q_len, kv_len))
        for first in range(0, kv_len, TILE):
            tile = seen[:, first : first + TILE]
            units = [tile[i : i + Q_TILE].any() for i in range(0, q_len, Q_TILE)]
            # A block of four rows is one query: its group has four heads.
            whole = tile.all(axis=1) & (tile.shape[1] == TILE)
            found += sum(units), (tile.any(axis=1) & ~whole).sum(), whole.sum()
    tiles, masked, whole_blocks = 2 * found  # KV heads
    return int(tiles), int(masked), int(whole_blocks)


@pytest.mark.parametrize("name", list(CASES))
def test_empty_tiles_are_not_visited_and_whole_ones_not_masked(counted: Any, name: str) -> None:
    libs, counts = counted
    spec, sees = CASES[name]
    rng = np.random.default_rng(3)
    starts = np.maximum.accumulate(np.where(rng.random((4, 702)) < 0.01, np.arange(702), 0), axis=1)
    call = PrefillCall(libs[name], LENS, Q_LENS, params={"doc_start": starts.astype(np.int32)})
    call.params = {p.name: call.params[p.name] for p in spec.attention.params}
    counts[:] = [0, 0, 0]
    call.run()
    assert tuple(counts) == expected(sees, call.params)


def test_where_no_tile_is_whole_all_are_masked(counted: Any) -> None:
    """And those that its interval leaves out are not visited."""
    libs, counts = counted
    counts[:] = [0, 0, 0]
    PrefillCall(libs["never full"], LENS, Q_LENS).run()
    tiles, masked, whole = expected(CASES["window"][1], {})
    assert tuple(counts) == (tiles, masked + whole, 0) and tiles > 0
