"""qk = "int8": the query is rounded to one int8 code per element, whatever the layout and the ISA row."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kvgen.tune.check import check_op
from tests.support.engines import CPU_ROWS, cpu_library, engine_params
from tests.support.specs import make_spec


def rounded(layout: str, fmt: str = "int8-token", q_dtype: str = "bf16") -> object:
    spec = make_spec(fmt, fmt, layout, page_size=16, kv_heads=2, group=4, head_dim=32, q_dtype=q_dtype)
    return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, qk="int8", pv="int8"))


@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
@pytest.mark.parametrize(("layout", "fmt", "q_dtype"), [
    ("quads", "int8-token", "bf16"), ("pairs", "int4-token", "f32"), ("hnd", "int8-head", "f32"),
])  # fmt: skip
def test_the_oracles_query_is_multiplied(row: str, layout: str, fmt: str, q_dtype: str) -> None:
    """In panels of quads by integers; elsewhere, as f32 numbers that stand for the same codes."""
    lib = cpu_library(rounded(layout, fmt, q_dtype), row)
    for op, variant in (("decode", "single"), ("decode", "multi"), ("prefill", "")):
        verdict = check_op(lib, op, variant)
        assert verdict.ok, verdict


@pytest.mark.parametrize("layout", ["quads", "hnd"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_what_is_not_finite_makes_its_row_nan(row: str, layout: str, value: float) -> None:
    """Not (0, -inf): that would say that there were no keys, and a merge would drop the row unnoticed."""
    lib = cpu_library(rounded(layout), row)
    cache = lib.new_cache(2)
    k = torch.randn(20, 2, 32, generator=torch.Generator().manual_seed(1))
    lib.append(cache, k, k.flip(0), torch.arange(20))
    q = k[:1].repeat(1, 4, 1).bfloat16()
    q[0, 1, 3] = value
    table, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    for found in (
        lib.decode(q, cache, table, lens),
        lib.prefill(q, cache, table, lens, lens.new_tensor([0, 1])),
    ):
        out, lse = found
        assert out[0, 1].isnan().all() and lse[0, 1].isnan()
        others = [0, *range(2, 8)]
        assert not out[0, others].isnan().any() and not lse[0, others].isnan().any()
