"""Machine code of the default schedules, compiled without a GPU: no spills, no narrow loads of K or V."""

from __future__ import annotations

from functools import cache

import pytest

from kvgen.builder import assemble
from kvgen.ir import Spec
from kvgen.passes.inspect import verify_binary
from tests.support.specs import make_spec

FORMATS = ("bf16", "f16", "int8-token", "int8-head")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MOST_PER_TOKEN = {"bf16": 12.0, "f16": 12.0, "int8-token": 16.5, "int8-head": 14.0}
"""Warp-instructions of the loop for each token of one KV head on sm_80 to sm_100, with 5% of slack."""


@cache
def llama(fmt: str) -> Spec:
    """The Llama-3-8B shape: 32 query and 8 KV heads of 128, page 16."""
    q_dtype = "f16" if fmt == "f16" else "bf16"
    return make_spec(
        layout="hnd", format_k=fmt, format_v=fmt, q_dtype=q_dtype, kv_heads=8, group=4, head_dim=128
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_reads_the_cache_well(fmt: str, target: str) -> None:
    found = assemble(llama(fmt), target).kernel("decode").resources()
    verify_binary("decode", target, found)
    loop = found["decode_split"]["loop"]
    assert loop["mma"], "decode must use the matrix units"
    if target.startswith("sm_"):
        assert any(name.endswith("128") for name in loop["loads"]), loop["loads"]
        assert loop["instr_per_token"] <= MOST_PER_TOKEN[fmt]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fmt", ("bf16", "int8-token"))
def test_prefill_does_not_spill(fmt: str, target: str) -> None:
    verify_binary("prefill", target, assemble(llama(fmt), target).kernel("prefill").resources())


@pytest.mark.parametrize("op", ("append", "merge", "copy", "gather"))
def test_the_other_ops_do_not_spill(op: str) -> None:
    verify_binary(op, "sm_90", assemble(llama("int8-token"), "sm_90").kernel(op).resources())
