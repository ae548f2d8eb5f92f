"""Which tiles CPU decode visits, and which of those it masks: counted by the kernels themselves.

Counters are written into the rendered sources; what they should say is counted from the oracle's masks.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from kvgen.backends.cpu import isa, loader
from kvgen.backends.cpu.backend import CpuKernel
from kvgen.backends.cpu.toolchain import compile_shared
from kvgen.ir.plan import KernelPlan
from kvgen.passes.render import render
from kvgen.reference.terms import Terms
from kvgen.variants.samples import sample_params
from tests.support.engines import cpu_library
from tests.support.variants import placed, variant_spec
from tests.support.world import World

LENS, Q_LENS = [300, 129, 64, 33, 200, 5], [5, 8, 1, 3, 2, 8]
TILE = 16
SHAPE = {"page_size": 8, "kv_heads": 1, "group": 1, "head_dim": 16}
MASKS = (
    "causal",
    "window",
    "window_right",
    "chunk",
    "prefix_lm",
    "document",
    "tree",
    "kv_first",
    "bool_mask",
)
"""All whose bounds say where a tile is seen by nobody, or by all; and one of which nothing is known."""


def counting(plan: KernelPlan) -> str:
    """The source, with a count of tiles and one of those that are masked or not there in full."""
    source, inside = render(plan), f"namespace {plan.entry}_impl {{\n"
    loop = "    for (int h = 0; h < HEADS; ++h) {\n      Rows rows;"
    assert source.count(loop) == source.count(inside) == 1
    never = plan.answers["never_full"]
    masked = "true" if never else "MASKED || !whole" if plan.answers["predicate"] else "!whole"
    source = source.replace(inside, f"{inside}static int64_t visited, masked;\n")
    source = source.replace(loop, f"    visited += 1, masked += {masked};\n{loop}")
    read = f"using namespace {plan.entry}_impl; to[0] = visited, to[1] = masked, visited = masked = 0;"
    return f'{source}\nextern "C" void {plan.entry}_counts(int64_t* to) {{ {read} }}\n'


class Counted:
    """Libraries of ``MASKS`` whose decode counts."""

    def __init__(self) -> None:
        knobs = {"decode": {"tile": TILE, "split_tokens": 512}}
        specs = {mask: variant_spec(mask=mask, **SHAPE) for mask in MASKS}
        self.libraries = {mask: cpu_library(spec, "portable", knobs) for mask, spec in specs.items()}
        plans = {
            (mask, variant): lib._plan("decode", variant)
            for mask, lib in self.libraries.items()
            for variant in ("single", "multi")
        }
        text = "\n".join(counting(plan) for plan in plans.values())
        flags = (*isa.flags_for("portable", ()), "-w")
        self.path = compile_shared(text, flags=flags, opt="-O1", name="counting")
        loaded = loader.load(self.path)
        for (mask, variant), plan in plans.items():
            self.libraries[mask]._kernels["decode", variant] = CpuKernel(plan, loaded)

    def counts(self, mask: str, variant: str) -> list[int]:
        """Tiles visited and masked since the last call."""
        entry = self.libraries[mask].kernel("decode", variant).plan.entry
        found = (ctypes.c_int64 * 2)()
        getattr(ctypes.CDLL(str(self.path)), f"{entry}_counts")(found)
        return list(found)


@pytest.fixture(scope="module")
def counted() -> Counted:
    """Compiled once."""
    return Counted()


def expected(mask: str, seen: np.ndarray) -> list[int]:
    """Of one request's mask [q, kv]: tiles between the first and the last key that somebody sees, and those
    of them that may not be seen by all, or are not there in full."""
    q_len, kv_len = seen.shape
    anybody, everybody = seen.any(axis=0), seen.all(axis=0)
    # What a tensor says of a key is not known before the key is met.
    unknown = {"tree": kv_len - q_len, "bool_mask": 0}.get(mask, kv_len)
    anybody[unknown:], everybody[unknown:] = True, False
    if not anybody.any():
        return [0, 0]
    first, last = (int(at) // TILE for at in np.flatnonzero(anybody)[[0, -1]])
    tiles = range(first, last + 1)
    full = [int(everybody[t * TILE : (t + 1) * TILE].sum()) == TILE for t in tiles]
    return [len(tiles), len(tiles) - sum(full)]


@pytest.mark.parametrize("variant", ["single", "multi"])
@pytest.mark.parametrize("mask", MASKS)
def test_no_empty_tile_is_visited_and_no_full_one_masked(counted: Counted, mask: str, variant: str) -> None:
    lib = counted.libraries[mask]
    q_lens = [1] * len(LENS) if variant == "single" else Q_LENS
    world = World(lib, sum(-(-n // SHAPE["page_size"]) for n in LENS) + 3)
    table, starts = world.table(LENS), [0, *accumulate(q_lens)]
    params = sample_params(lib.spec, kv_lens=LENS, q_starts=starts, rng=np.random.default_rng(1))
    given: dict[str, Any] = {"params": placed(world, params) or None, "num_threads": 1}
    ragged = (world.ints(starts),) if variant == "multi" else ()
    lib.decode(world.query(starts[-1]), world.cache, table, world.ints(LENS), *ragged, **given)
    terms = Terms(lib.spec.attention, params)
    each = [
        expected(mask, terms.visible(b, starts[b], q_lens[b], kv_len)[0].copy())
        for b, kv_len in enumerate(LENS)
    ]
    assert counted.counts(mask, variant) == [sum(column) for column in zip(*each, strict=True)]
