"""What a refusal proposes: each change works, for every op, and none changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvgen.builder import assemble
from kvgen.errors import UnsupportedError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec, validate
from kvgen.tune.nearest import changes

ROW = {"tok": 1, "head": 1}

REFUSED: dict[str, tuple[str, int, str, dict[str, Any], int]] = {
    "f32 of 576": ("sm_90", 576, "f32", {"format": "f32"}, 8),
    "f32 of 576, bf16 query": ("sm_90", 576, "bf16", {"format": "f32"}, 8),
    "int8 of 576, f32 query": ("gfx942", 576, "f32", {"format": "int8"}, 8),
    "int8 in blocks": ("sm_90", 256, "bf16", {"format": "int8", "group": {**ROW, "d": 32}}, 8),
    "int8 in blocks, f32 query": ("sm_90", 320, "f32", {"format": "int8", "group": {**ROW, "d": 32}}, 8),
    "int4 in blocks": ("sm_89", 576, "bf16", {"format": "int4", "group": {**ROW, "d": 32}}, 8),
    "channels": ("sm_90", 320, "f32", {"format": "int4", "group": {"head": 1, "tok": 16, "d": 1}}, 8),
    "nvfp4": ("sm_120", 576, "f32", {"format": "nvfp4"}, 1),
}
"""Target, head_dim, q_dtype, storage, group of heads."""


def spec_of(name: str) -> tuple[str, Spec]:
    target, dim, q_dtype, stored, group = REFUSED[name]
    heads = {"q_heads": group, "kv_heads": 1, "head_dim": dim, "q_dtype": q_dtype}
    return target, load_spec({"attention": heads, "cache": {"page_size": 16, "k": stored, "v": dict(stored)}})


def build(spec: Spec, target: str) -> None:
    """Plan everything; ``UnsupportedError`` where something is refused."""
    library = assemble(spec, target, tune="off")
    for op, variant in (("decode", "single"), ("decode", "multi"), ("prefill", ""), ("gather", "f32")):
        library.backend.plan(op, library.spec, library.record, library.schedules[op], library.target, variant)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_proposed_works(name: str) -> None:
    target, spec = spec_of(name)
    with pytest.raises(UnsupportedError, match="what would fit: ") as caught:
        build(spec, target)
    proposed = re.split(", or ", str(caught.value).partition("what would fit: ")[2])
    known = dict(changes(spec))
    assert 1 <= len(proposed) <= 2 and set(proposed) <= set(known), proposed
    for words in proposed:
        changed = validate(known[words])
        assert changed.hash != spec.hash, words
        build(changed, target)


def test_the_proposals_of_some() -> None:
    """At 45e598f: "up to 256, or up to 128", and "an int8 cache" for one."""
    for name, wanted in {
        "f32 of 576": "head_dim = ",
        "int8 in blocks": "groups without d (a scale for each row)",
    }.items():
        target, spec = spec_of(name)
        with pytest.raises(UnsupportedError, match=re.escape(f"what would fit: {wanted}")) as caught:
            build(spec, target)
        assert 'format = "int8"' not in str(caught.value)
        assert str(caught.value).count("head_dim = ") <= 1
