"""Rows of every codec on the CPU: append writes the oracle's bytes, and gather reads its numbers.

The formats with operands of their own are ``test_codec``'s. Every row of the ISA must leave the same
bytes: here those without bf16 pairs, which no writer uses.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.tune.check_bytes import CHECKS
from tests.support.bundle import prepare
from tests.support.engines import CPU_ROWS, cpu_library, engine_params
from tests.support.specs import LAYOUTS

ROW = {"head": 1, "tok": 1}
CHANNEL = {"head": 1, "tok": 16, "d": 1}
Table = dict[str, Any]


def of(k: Table, v: Table, width: int = 64, layout: str = "hnd", q_dtype: str = "f32",
       rope: Table | None = None, **raw: int) -> Spec:  # fmt: skip
    """K and V of two heads in pages of 32 tokens."""
    strings = LAYOUTS[layout]
    attention = {"q_heads": 2, "kv_heads": 2, "head_dim": width, "q_dtype": q_dtype}
    attention |= {"rope": rope} if rope else {}
    own = {side: {**table, **({"layout": strings[side]} if side in strings else {})}
           for side, table in (("k", k), ("v", v))}  # fmt: skip
    cache = {"page_size": 32, "layout": strings["cache"], **raw, **own}
    return load_spec({"name": "rows", "attention": attention, "cache": cache})


SPECS = {
    "channels of f16 scales": of(
        {"format": "int4", "affine": True, "group": CHANNEL, "scale_dtype": "f16"},
        {"format": "int2", "affine": True, "group": ROW | {"d": 32}, "scale_dtype": "bf16"},
        q_dtype="f16", keep_first=3, keep_last=20,
    ),
    "channels in columns": of(
        {"format": "int8", "group": CHANNEL, "scale_dtype": "f16"},
        {"format": "int3", "group": {"head": 1, "tok": 16}, "scale_dtype": "e8m0"},
        layout="columns", q_dtype="bf16",
    ),
    "two planes": of(
        {"format": "int3", "affine": True, "scales": "pool"}, {"format": "e5m2", "scales": "inline"}
    ),
    "fp4 under two scales": of({"format": "nvfp4"}, {"format": "mxfp4", "transform": "hadamard"}, 128, "nhd"),
    "codebooks": of(
        {"format": "lloyd3", "transform": "hadamard", "scale_dtype": "f16", "mean": True},
        {"format": "table", "levels": [-1, -0.4, 0.1, 2], "group": ROW | {"d": 16}, "scale_dtype": "e4m3"},
    ),
    "segments": of(
        {"segments": [{"size": 32, "format": "e2m1"}, {"size": 16, "format": "f16"},
                      {"size": 16, "format": "int8", "affine": True}], "scales": "inline"},
        {"format": "e5m2", "group": {"head": 1}}, layout="nhd",
    ),
    "given scales": of(
        {"format": "int2", "group": {"head": 1}},
        {"format": "table", "group": {}, "levels": [-7.0, 0.0, 7.0]},
    ),
    "channels of turned keys": of(
        {"format": "int4", "group": CHANNEL, "transform": "hadamard", "mean": True}, {"format": "nvfp4"},
        rope={"kind": "default"}, keep_first=3,
    ),
    "a given scale first": of(
        {"segments": [{"size": 16, "format": "e5m2", "group": {}}, {"size": 48, "format": "int8"}]},
        {"format": "int8"}, keep_last=9,
    ),
    "only protected": of({"format": "int8"}, {"format": "bf16"}, q_dtype="bf16", keep_first=33),
}  # fmt: skip
KERNELS = ("append", "f32"), ("append", "bf16"), ("gather", "f16"), ("copy", "")


@pytest.fixture(scope="module", params=engine_params(CPU_ROWS[1:]))
def libraries(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every spec of this file on one ISA row, compiled together."""
    found = {name: cpu_library(spec, request.param) for name, spec in SPECS.items()}
    prepare((lib, KERNELS) for lib in found.values())
    return found


@pytest.mark.parametrize("name", list(SPECS))
def test_rows_are_the_oracles(libraries: dict[str, Any], name: str) -> None:
    """Rows of zeros, denormals, ties, NaN and infinities too; decode steps, chunks, whole prompts."""
    wrong = [
        f"{op} {dtype}: {case}: {count} {message}"
        for op, dtype in KERNELS
        for case, count, message in CHECKS[op](libraries[name], dtype, 1)
        if count or message
    ]
    assert not wrong, wrong
