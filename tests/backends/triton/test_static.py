"""Machine code of the default schedules, compiled without a GPU: few instructions, no spills, wide loads.

Goals are warp-instructions of the main loop for each token of one KV head, 32 query and 8 KV heads of 128,
page 16; an assertion allows 10% more. Each kernel is compiled once a session.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvgen.builder import assemble
from kvgen.ir import Spec
from kvgen.passes.inspect import verify_binary
from kvgen.targets import TARGETS
from tests.support.specs import make_spec
from tests.support.triton_calls import kernel

GOALS: dict[str, dict[str, float]] = {
    "bf16": {"sm_80": 11, "sm_90": 11, "sm_100": 11},
    "f16": {"sm_80": 11, "sm_90": 11},
    "e4m3-token": {"sm_80": 24, "sm_90": 18},
    "e4m3-tensor": {"sm_90": 18},
    "int8-token": {"sm_80": 16, "sm_90": 16, "sm_100": 16},
    "int8-head": {"sm_90": 14},
    "int4-token": {"sm_80": 17, "sm_90": 17},
}
"""What the project set itself; ``int8-head`` as it was reached."""

ISSUE_PER_CLOCK = 4
"""Warp instructions that a multiprocessor starts in a cycle."""


def kv_bytes(fmt: str) -> int:
    """Bytes of K and V of one token and head, scales left out."""
    return {"bf16": 512, "f16": 512, "e4m3": 256, "int8": 256, "int4": 128}[fmt.partition("-")[0]]


@cache
def llama(fmt: str) -> Spec:
    """The Llama-3-8B shape: 32 query and 8 KV heads of 128, page 16."""
    q_dtype = "f16" if fmt == "f16" else "bf16"
    return make_spec(
        layout="hnd", format_k=fmt, format_v=fmt, q_dtype=q_dtype, kv_heads=8, group=4, head_dim=128
    )


@cache
def resources(op: str, fmt: str, target: str) -> dict[str, Any]:
    """What the binaries of an op say."""
    return assemble(llama(fmt), target).kernel(op).resources()


@pytest.mark.parametrize(("fmt", "target"), [(f, t) for f, goals in GOALS.items() for t in goals])
def test_decode_meets_its_goal(fmt: str, target: str) -> None:
    found = resources("decode", fmt, target)
    verify_binary("decode", target, found)
    loop = found["decode_split"]["loop"]
    assert loop["mma"], "decode must use the matrix units"
    assert not loop["local_loads"] and not loop["narrow_loads"]
    assert loop["instr_per_token"] <= 1.1 * GOALS[fmt][target]
    chip = TARGETS[target]
    token_s = kv_bytes(fmt) / chip.hbm_bytes_per_s
    assert loop["instr_per_token"] < ISSUE_PER_CLOCK * chip.sms * chip.clock_hz * token_s, "above the budget"


@pytest.mark.parametrize(("fmt", "target"), [(f, t) for f, goals in GOALS.items() for t in goals])
def test_decode_copies_the_cache_in_steps_of_16_bytes(fmt: str, target: str) -> None:
    found = resources("decode", fmt, target)["decode_split"]
    tile = int(assemble(llama(fmt), target).kernel("decode").plan.constant("TILE"))
    threads = 32 * found["num_warps"]
    wide = {name: n for name, n in found["loop"]["loads"].items() if name.endswith("128")}
    assert wide == {"LDGSTS.128": tile * kv_bytes(fmt) // (16 * threads)}


def test_an_unrolled_loop_needs_fewer_instructions_still() -> None:
    """Counted for each token, not for each pass."""
    found = kernel("decode", llama("bf16"), "sm_90", unroll=2, num_stages=3).resources()
    verify_binary("decode", "sm_90", found)
    once = resources("decode", "bf16", "sm_90")["decode_split"]["loop"]["instr_per_token"]
    assert 0.7 * once < found["decode_split"]["loop"]["instr_per_token"] < once


@pytest.mark.parametrize("fmt", ("bf16", "int8-token", "int4-token", "e4m3-token"))
def test_decode_compiles_for_amd(fmt: str) -> None:
    found = resources("decode", fmt, "gfx942")
    verify_binary("decode", "gfx942", found)
    assert any(name.startswith("v_mfma") for name in found["decode_split"]["loop"]["mma"])


@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "gfx942"))
@pytest.mark.parametrize("fmt", ("bf16", "int8-token"))
def test_prefill_does_not_spill(fmt: str, target: str) -> None:
    verify_binary("prefill", target, resources("prefill", fmt, target))


def test_prefill_keeps_the_matrix_units_of_hopper_busy() -> None:
    """A pass of 128 x 128 scores is 2048 cycles of an SM's matrix units at 4096 operations a cycle."""
    found = resources("prefill", "bf16", "sm_90")["prefill"]
    assert found["loop"]["mma"] == {"HGMMA": 16}
    constant = assemble(llama("bf16"), "sm_90").kernel("prefill").plan.constant
    cycles = 4 * int(constant("TILE")) * int(constant("ROWS")) * 128 / 4096
    slots = found["loop"]["instructions"] * found["num_warps"] / ISSUE_PER_CLOCK
    assert slots / cycles <= 0.65


@pytest.mark.parametrize("op", ("append", "merge", "copy", "gather"))
def test_the_other_ops_do_not_spill(op: str) -> None:
    verify_binary(op, "sm_90", resources(op, "int8-token", "sm_90"))


@pytest.mark.parametrize("fmt", ("int4-token", "e4m3-token"))
def test_append_of_small_formats_does_not_spill(fmt: str) -> None:
    verify_binary("append", "sm_80", resources("append", fmt, "sm_80"))
