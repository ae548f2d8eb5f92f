"""A registered name is what it means: in the identity, the cache, the symbols and the keys of tuning."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvgen
from kvgen.errors import ArgumentError
from kvgen.ir.codec import CODECS, Codec, registered
from kvgen.ir.plan import OPS
from kvgen.passes.fields import SWITCH, Field
from kvgen.passes.validate import load_spec
from kvgen.runtime.manifest import carried
from kvgen.tune.key import read_by
from kvgen.variants import Definition, Formula, Position, definition
from kvgen.variants import registered as registered_variants
from tests.support.specs import make_spec

MINE = Codec("mine", "table", 2, 3.0, levels=(-3.0, -1.0, 1.0, 3.0))
OTHER = replace(MINE, levels=(-3.0, -0.5, 0.5, 3.0))
GROUP = {"tok": 1, "head": 1}


def spec_raw() -> dict[str, Any]:
    raw = make_spec("f32", "f32", head_dim=32).to_dict()
    raw["cache"]["k"] = {"format": "mine", "group": GROUP}
    return raw


def facts(codec: Codec) -> tuple[str, dict[str, Any]]:
    """The identity of a spec of the codec, and what each op is keyed by."""
    with registered(codec):
        spec = load_spec(spec_raw())
        return spec.hash, {op: read_by(op, spec) for op in OPS}


def mask(text: str) -> Definition:
    return Definition(
        "mine",
        "mask",
        Field(SWITCH, "true", None),
        "d",
        "s",
        lambda value, heads: Formula(text),
        {"mine": True},
    )


def test_codecs_of_one_name_have_identities_of_their_own() -> None:
    (one, reads), (two, other) = facts(MINE), facts(OTHER)
    assert one != two
    assert one == facts(replace(MINE, doc="told otherwise"))[0]
    assert {op for op in OPS if reads[op] == other[op]} == {"merge"}


def test_a_copy_of_a_codec_that_kvgen_brings_is_no_longer_kvgens() -> None:
    """``replace`` carries over all that the original says of itself, but not whose it is."""
    four, five = (replace(CODECS["int4"], name="mine", qmax=qmax) for qmax in (7.0, 5.0))
    assert facts(four)[0] != facts(five)[0]
    with registered(five):
        spec = load_spec(spec_raw())
        assert carried(spec) == (five,)  # an export holds what it means
    assert carried(make_spec("int4-head", "int4-head")) == ()


def test_another_codec_of_the_name_does_not_read_the_cache() -> None:
    with registered(MINE):
        first = kvgen.build(spec_raw(), target="cpu-portable", tune="off")
        cache, source = first.new_cache(2), first.source("gather")
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with registered(OTHER):
        second = kvgen.build(spec_raw(), target="cpu-portable", tune="off")
        with pytest.raises(ArgumentError, match="cache: made for spec"):
            second.gather(cache, table, lens)
        entries = [re.findall(r"kvgen_gather_\w{8}", text)[0] for text in (source, second.source("gather"))]
    assert entries[0] != entries[1]


def test_masks_of_one_name_have_identities_of_their_own() -> None:
    raw = make_spec("f32", "f32").to_dict()
    raw["attention"]["mine"] = True
    found = []
    for text in ("kv_pos % 2 == 0", "kv_pos % 3 == 0"):
        with registered_variants(mask(text)):
            found.append(load_spec(raw))
    assert found[0].hash != found[1].hash
    assert read_by("decode", found[0]) != read_by("decode", found[1])
    assert read_by("append", found[0]) == read_by("append", found[1])


def test_position_schemes_of_one_name_have_identities_of_their_own() -> None:
    raw = make_spec("f32", "f32").to_dict()
    raw["attention"]["rope"] = {"kind": "mine"}
    found = []
    for factor in (1.0, 2.0):
        scheme = Position("mine", {}, "d", "s", lambda rope, factor=factor: ([factor] * (rope.dim // 2), 1.0))
        with registered_variants(scheme):
            found.append(load_spec(raw))
    assert read_by("append", found[0]) != read_by("append", found[1])


def test_what_kvgen_brings_stands_for_itself() -> None:
    raw = make_spec("int8-token", "int8-token").to_dict()
    raw["attention"] |= {"soft_cap": 30.0, "window": 7, "rope": {"kind": "linear", "factor": 2.0}}
    assert load_spec(raw).meanings == ()
    assert definition("soft_cap").name == "soft_cap"
