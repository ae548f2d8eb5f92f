"""Machine code of variants under default schedules: no spills, full tiles that cost no more."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvgen.backends.triton.inspection import inspect_kernel
from kvgen.passes.inspect import verify_binary
from tests.support.triton_calls import kernel
from tests.support.triton_specs import deepseek, llama, unturned

SLOPE = {"slope": {"dims": ["head"], "dtype": "f32"}}
SCORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "soft cap": ({"soft_cap": 50.0}, {"score": "50.0 * tanh(score / 50.0)"}),
    "ALiBi": ({"alibi": True}, {"score": "score - slope[head] * abs(q_pos - kv_pos)", "params": SLOPE}),
    "window": ({"window": 512}, {"mask": "q_pos - kv_pos <= 512"}),
}
"""A built-in term, and the same written as an expression."""


@cache
def built(op: str, variant: str, target: str, make: Any, keys: str) -> tuple[dict[str, Any], Any]:
    """Facts and loop of the first kernel; ``make`` builds the spec from ``KEYS[keys]``."""
    found = kernel(op, make(**KEYS[keys]), target, variant)
    facts = found.resources()
    verify_binary(op, target, facts, found.plan.spec)
    return facts[found.parts[0].kernel], inspect_kernel(found.compiled[0]).main_loop


KEYS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "bits": {"causal": False, "bool_mask": "bits"},
    "everything": {
        "window": 512,
        "kv_first": True,
        "head_scale": True,
        "alibi": True,
        "soft_cap": 50.0,
        "sink_logit": True,
    },
    "turned halves": {"rope": unturned(pairing="half")},
    "latent": {},
}
KEYS |= {f"{name}, built in": pair[0] for name, pair in SCORES.items()}
KEYS |= {f"{name}, expression": pair[1] for name, pair in SCORES.items()}


def test_full_tiles_cost_what_full_attention_costs() -> None:
    """Decode's main loop: the same loads and products, as many instructions but for a few of addresses."""
    plain, plain_loop = built("decode", "single", "sm_90", llama, "full")
    facts, loop = built("decode", "single", "sm_90", llama, "window, built in")
    assert facts["loop"]["loads"] == plain["loop"]["loads"] and facts["loop"]["mma"] == plain["loop"]["mma"]
    assert abs(loop.instructions - plain_loop.instructions) <= 0.02 * plain_loop.instructions
    # What a mask would add to.
    for opcodes in (("FSEL",), ("FSETP",), ("MUFU",), ("FMNMX",), ("ISETP", "UISETP")):
        ours, theirs = (sum(x.opcodes.get(op, 0) for op in opcodes) for x in (loop, plain_loop))
        assert ours <= theirs, opcodes


@pytest.mark.parametrize("name", list(SCORES))
def test_an_expression_costs_what_the_built_in_term_costs(name: str) -> None:
    ours, own = (
        built("decode", "single", "sm_90", llama, f"{name}, {side}")[1] for side in ("built in", "expression")
    )
    assert abs(ours.instructions - own.instructions) <= 0.1 * ours.instructions


@pytest.mark.parametrize(
    ("op", "variant", "target", "name"),
    [
        ("decode", "multi", "sm_90", "bits"),
        ("decode", "single", "gfx942", "everything"),
        ("decode", "single", "sm_90", "turned halves"),
    ],
)
def test_variants_keep_to_their_registers(op: str, variant: str, target: str, name: str) -> None:
    facts, _ = built(op, variant, target, llama, name)
    assert facts["loop"]["mma"] and not facts["loop"]["local_loads"]


def test_latent_decode_reads_each_row_once_and_meets_its_goal() -> None:
    facts, _ = built("decode", "single", "sm_90", deepseek, "latent")
    assert facts["loop"]["instr_per_token"] <= 38
    # 64 keys of 1,152 bytes over 128 threads, 16 bytes each time
    assert facts["loop"]["loads"]["LDGSTS.128"] == 64 * 1152 // 16 // 128
