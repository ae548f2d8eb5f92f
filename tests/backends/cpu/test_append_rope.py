"""Keys turned by append on the CPU: the oracle's bytes in every format, and no byte beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgen import reference
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.variants import positions
from tests.support.bundle import prepare
from tests.support.engines import CPU_ROWS, cpu_library, engine_params
from tests.support.oracle import to_numpy
from tests.support.world import HUGE_IDS, World

TOKEN = {"tok": 1, "head": 1}
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
HALF = {"kind": "default"}
PARTIAL = {"kind": "default", "pairing": "interleaved", "dim": 24, "theta": 500.0}


def of(rope: dict[str, Any], k: dict[str, Any], page: int = 16, **attention: Any) -> Spec:
    heads = {"q_heads": 2, "kv_heads": 2, "head_dim": 64, "q_dtype": "f32"}
    cache = {"page_size": page, "layout": "page kv head tok d", "k": k, "v": {"format": "bf16"}}
    return load_spec({"name": "turned", "attention": {**heads, **attention, "rope": rope}, "cache": cache})


SPECS = {
    "f32": of(PARTIAL, {"format": "f32"}),
    "f32 whole": of({"kind": "default", "pairing": "interleaved"}, {"format": "f32"}),
    "bf16": of(HALF, {"format": "bf16"}, head_dim=72),
    "f16 columns": of(HALF, {"format": "f16", "layout": "head d tok"}, page=8),
    "int8": of(PARTIAL, {"format": "int8", "group": TOKEN}, page=5),
    "int8 given": of(HALF, {"format": "int8", "group": {"head": 1}}),
    "int4 blocks in quads": of(
        HALF, {"format": "int4", "group": {**TOKEN, "d": 16}, "layout": "head d/4 tok d%4"}
    ),
    "e4m3 beside tokens": of(PARTIAL, {"format": "e4m3", "group": TOKEN, "layout": "head tok/8 d tok%8"}),
    "yarn": of(
        {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"format": "int8", "group": {**TOKEN, "d": 32}},
    ),
}


@pytest.fixture(scope="module", params=engine_params(CPU_ROWS[1:]))
def libraries(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every spec of this file on one ISA row, compiled together; bf16 pairs do not matter here."""
    found = {name: cpu_library(spec, request.param) for name, spec in SPECS.items()}
    prepare((lib, [("append", dtype) for dtype in FLOATS]) for lib in found.values())
    return found


@pytest.mark.parametrize("dtype", list(FLOATS))
@pytest.mark.parametrize("name", list(SPECS))
def test_turned_keys_are_stored_byte_for_byte(libraries: dict[str, Any], name: str, dtype: str) -> None:
    """Shuffled tokens of all magnitudes, some of them skipped, whose positions are then not read."""
    spec = SPECS[name]
    world, rope, att = World(libraries[name], 40), spec.attention.rope, spec.attention
    assert rope is not None
    table = reference.rope_table(*positions()[rope.kind].frequencies(rope), 5000)
    slots = world.rng.permutation(40 * spec.cache.page_size)[:150]
    at = world.rng.integers(0, 5000, 150)
    at[:3] = 0, 4999, 1
    slots[world.rng.integers(0, 150, 12)] = -1
    k, v = (world.normal(150, 2, width, dtype=FLOATS[dtype]) for width in (att.head_dim, att.v_head_dim))
    k *= world.tensor(torch.from_numpy(2.0 ** world.rng.integers(-9, 5, (150, 1, 1)))).to(k.dtype)
    k[5], k[6, 0, 3], k[7, 1, 2] = 0.0, torch.inf, torch.nan
    expected = world.snapshot()
    static = world.cache.planes.get("k_scale") if name == "int8 given" else None
    reference.append(
        spec, world.record, expected, world.num_pages, to_numpy(k), to_numpy(v), slots,
        positions_T=np.where(slots < 0, 0, at), params={"rope_table": table},
        scales=None if static is None else {"k": static.numpy()},
    )  # fmt: skip
    nonsense = np.where(slots < 0, HUGE_IDS[0], at)
    angles = {"rope_table": world.tensor(torch.from_numpy(table))}
    for part in (slice(0, 33), slice(33, 33), slice(33, None)):
        world.lib.append(
            world.cache,
            world.tensor(k[part]),
            world.tensor(v[part]),
            world.ints(slots[part].tolist(), torch.int64),
            world.ints(nonsense[part].tolist()),
            params=angles,
        )
    assert all(not len(changed) for changed in world.changed(expected).values())


def test_a_spec_without_rope_asks_for_no_positions() -> None:
    source = cpu_library(of(HALF | {"stored": "pre"}, {"format": "bf16"}), "avx2").source("append")
    assert "positions" not in source and "rotate" not in source
    latent = {"page_size": 16, "layout": "page kv head tok d", "k": {"format": "bf16"}, "v": {"alias": "k"}}
    heads = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "v_head_dim": 48, "q_dtype": "bf16"}
    lib = cpu_library(load_spec({"name": "latent", "attention": heads, "cache": latent}), "avx2")
    assert all("a.v" not in lib.source(op) for op in ("append", "gather"))
