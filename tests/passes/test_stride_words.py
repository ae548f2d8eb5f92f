"""What kernels say of their strides is true: a step as the comment describes it moves by the stride."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvgen.builder import assemble
from kvgen.ir import Spec
from kvgen.ir.quant import PACKED
from kvgen.passes.lower import lower_addresses, plane_units, stride_constants
from kvgen.passes.place import place
from kvgen.passes.validate import validate
from tests.support.specs import LAYOUTS, make_spec

WORDS = re.compile(
    r"(?P<unit>bytes|elements) from one (block of (?P<block>\d+) )?"
    r"(?P<one>head|token|element of d|byte of d|elements of d|bytes of d|tokens) to the next"
    r"(, within (?P<within>\d+))?"
)

ODD = ("tok/4 head d tok%4", "d/8 head tok d%8", "head d/64 tok d%64", "tok/16 head d/4 tok%16 d%4")


def specs() -> dict[str, Spec]:
    found = {}
    for name in LAYOUTS:
        for form in ("bf16", "int8-token", "int4-token"):
            found[f"{name} {form}"] = make_spec(form, form, name, 64, 4, 8, 128)
    for inner in ODD:
        for group in ({"tok": 1, "head": 1}, {"tok": 1, "head": 1, "d": 32}):
            side: dict[str, Any] = {"format": "int8", "group": group, "layout": inner}
            raw = {
                "attention": {"q_heads": 4, "kv_heads": 4, "head_dim": 128},
                "cache": {"page_size": 64, "layout": "page kv head tok d", "k": side, "v": side},
            }
            found[f"{inner} {'blocks' if 'd' in group else 'rows'}"] = validate(raw)
    return found


@pytest.mark.parametrize("name", list(specs()))
def test_a_comment_says_what_its_stride_steps_over(name: str) -> None:
    record = place(spec := specs()[name])
    addresses = lower_addresses(spec, record)
    said = {c.name: c for c in stride_constants(addresses, plane_units(record))}
    checked = 0
    for plane in record.planes:
        for term in addresses[plane.name].terms:
            if term.stride_name not in said:
                continue
            constant = said[term.stride_name]
            words = WORDS.fullmatch(constant.doc)
            assert words, constant
            step = int(words["block"] or 1)
            assert step < int(words["within"] or 2**31)
            zero = dict.fromkeys(("page", "head", "tok", "d"), 0)
            strides = {t.stride_name: 0 for t in addresses[plane.name].terms if t.stride is None}
            moved = addresses[plane.name].at(strides, **zero | {term.dim: step})
            assert moved - addresses[plane.name].at(strides, **zero) == constant.value
            assert words["one"].startswith({"tok": "token", "head": "head"}.get(term.dim, words["unit"][:-1]))
            assert (words["unit"] == "bytes") == (plane.dtype in PACKED)
            checked += 1
    assert checked


@pytest.mark.parametrize("target", ["cpu-portable", "sm_90"])
def test_a_heading_says_how_each_side_is_stored(target: str) -> None:
    """At 45e598f it named the cache's axes for sides that have their own, and f32 for segments."""
    row = {"tok": 1, "head": 1}
    own = {"format": "int8", "group": row, "layout": "head d/4 tok d%4"}
    cut = {"segments": [{"size": 32, "format": "int8"}, {"size": 32, "format": "bf16"}]}
    for heads, k, v, wanted in (
        (2, own, {"format": "bf16"}, "K int8 as 'head d/4 tok d%4', V bf16"),
        (2, cut, {"format": "bf16"}, "K 32 int8 + 32 bf16, V bf16"),
        (1, {"format": "bf16"}, {"alias": "k"}, "K bf16, V inside K"),
    ):
        raw = {
            "attention": {"q_heads": 4, "kv_heads": heads, "head_dim": 64},
            "cache": {"page_size": 16, "k": k, "v": v},
        }
        text = assemble(validate(raw), target, tune="off").source("decode", "single")
        assert wanted in text[:600]
        assert target == "cpu-portable" or f"over {heads} KV head{'s' * (heads > 1)} of" in text


@pytest.mark.parametrize("keep", [{}, {"keep_first": 4, "keep_last": 16}])
def test_what_a_loop_is_said_to_visit_holds_of_raw_tokens_too(keep: dict[str, int]) -> None:
    """At 45e598f tiles were masked "as not every row sees them" where they hold raw tokens."""
    raw = {
        "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64},
        "cache": {"page_size": 16, "k": {"format": "int8"}, "v": {"format": "int8"}, **keep},
    }
    text = assemble(validate(raw), "sm_90", tune="off").source("decode", "single")
    assert ("# The first tiles: not seen by every row, or with raw tokens." in text) == bool(keep)
    assert ("or not seen by every row, or with raw tokens." in text) == bool(keep)
    assert ("# Full tiles of codes, seen by every row: no masks." in text) == bool(keep)
