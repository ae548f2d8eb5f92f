"""Specs: JSON round trip, defaults, and an identity that leaves out the name and nothing else."""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.support.specs import covering_specs, make_spec, raw_specs, specs

RAW: dict[str, Any] = {
    "attention": {"q_heads": 8, "kv_heads": 2, "head_dim": 64},
    "cache": {"page_size": 16, "k": {"format": "int8"}, "v": {"format": "bf16"}},
}


@given(specs())
def test_dict_and_json_round_trip(spec: Spec) -> None:
    assert load_spec(spec.to_dict()) == spec
    again = load_spec(json.loads(spec.canonical()))
    assert (again.attention, again.cache, again.hash) == (spec.attention, spec.cache, spec.hash)


@given(raw_specs())
def test_loading_leaves_the_raw_mapping_alone(raw: dict[str, Any]) -> None:
    before = copy.deepcopy(raw)
    load_spec(raw)
    assert raw == before


@given(specs())
def test_name_is_no_part_of_the_identity(spec: Spec) -> None:
    other = load_spec(spec.to_dict() | {"name": "another"})
    assert other.hash == spec.hash
    assert other != spec or spec.name == "another"
    assert spec.hash8 == spec.hash[:8]


def test_spelling_out_the_defaults_changes_nothing() -> None:
    spelled = copy.deepcopy(RAW)
    spelled["attention"] |= {"v_head_dim": 64, "q_dtype": "bf16", "scale": 0.125, "causal": True}
    spelled["attention"] |= {"window": None, "qk": "exact", "pv": "exact"}
    spelled["cache"] |= {"layout": "page  kv head tok d", "align": 64}
    spelled["cache"]["k"] |= {"group": {"tok": 1, "head": 1}, "scale_dtype": "f32"}
    assert load_spec(spelled) == load_spec(RAW)
    assert load_spec(spelled).hash == load_spec(RAW).hash


@pytest.mark.parametrize(
    "table, change",
    [
        ("attention", {"q_heads": 16}),
        ("attention", {"q_heads": 4, "kv_heads": 1}),
        ("attention", {"head_dim": 72}),
        ("attention", {"v_head_dim": 72}),
        ("attention", {"q_dtype": "f16"}),
        ("attention", {"scale": 0.25}),
        ("attention", {"causal": False}),
        ("attention", {"window": 0}),
        ("cache", {"page_size": 32}),
        ("cache", {"align": 128}),
        ("cache", {"layout": "page kv tok head d"}),
        ("cache", {"k": {"format": "bf16"}}),
        ("cache", {"k": {"format": "int8", "group": {}}}),
        ("cache", {"k": {"format": "int8", "group": {"head": 1}}}),
        ("cache", {"v": {"format": "bf16", "layout": "tok head d"}}),
    ],
)
def test_every_field_is_part_of_the_identity(table: str, change: dict[str, Any]) -> None:
    changed = RAW | {table: RAW[table] | change}
    assert load_spec(changed).hash != load_spec(RAW).hash


def test_the_identity_does_not_drift() -> None:
    """Tuned winners and compiled kernels on disk are keyed by it: changing it orphans them all."""
    text = load_spec(RAW).canonical()
    assert text == (
        '{"attention":{"causal":true,"head_dim":64,"kv_heads":2,"pv":"exact","q_dtype":"bf16","q_heads":8,'
        '"qk":"exact","scale":0.125,"v_head_dim":64},"cache":{"align":64,"k":{"format":"int8","group":'
        '{"head":1,"tok":1},"scale_dtype":"f32"},"layout":"page kv head tok d","page_size":16,'
        '"v":{"format":"bf16"}}}'
    )


def test_specs_are_frozen_and_hashable() -> None:
    spec = load_spec(RAW)
    assert len({spec, load_spec(RAW)}) == 1
    with pytest.raises(FrozenInstanceError):
        spec.attention.scale = 1.0  # type: ignore[misc]


def test_covering_array_covers_all_pairs_and_is_stable() -> None:
    found = covering_specs(seed=3, head_dim=(32, 80), page_size=(1, 16), kv_heads=(1, 4), group=(1, 7))
    assert found == covering_specs(
        seed=3, head_dim=(32, 80), page_size=(1, 16), kv_heads=(1, 4), group=(1, 7)
    )
    pairs = {(s.cache.k.format, s.cache.k.scale_dims, s.cache.v.format, s.cache.v.scale_dims) for s in found}
    assert len(pairs) == 162  # of 13 * 13: blocks of d do not tile half a row of 80 elements in int4
    assert len({(str(s.cache.layout), s.cache.page_size, s.attention.head_dim) for s in found}) > 24
    assert len(found) < 250  # of 13 * 13 * 15 * 16 * 5 * 3
    with pytest.raises(TypeError, match="pagesize"):
        covering_specs(pagesize=(1,))


def test_group_is_the_number_of_query_heads_for_each_kv_head() -> None:
    assert make_spec(kv_heads=4, group=7).attention.group == 7
