"""[cache.k]: what codecs, scales, transforms, segments and raw rows a spec may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.errors import SpecError
from kvgen.ir import Spec
from kvgen.ir.codec import CODECS
from kvgen.ir.raw import RawSpec
from kvgen.ir.verify import verify_record
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec

ROW = {"tok": 1, "head": 1}
CHANNEL = {"tok": 32, "head": 1, "d": 1}
HALF = {"size": 32, "format": "int8"}


def spec(k: dict[str, Any], v: dict[str, Any] | None = None, **more: Any) -> Spec:
    att = {"q_heads": 8, "kv_heads": 2, "head_dim": 64} | more.pop("attention", {})
    sides = {"k": k, "v": {"format": "bf16"} if v is None else v}
    return load_spec({"attention": att, "cache": {"page_size": 32, **sides, **more}})


def mistakes(*args: Any, **more: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        spec(*args, **more)
    return {found.path: found.reason for found in caught.value.diagnostics}


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_reads_back_and_is_placed(name: str) -> None:
    side = {"format": name, **CODECS[name].example}
    found = spec(side, side)
    assert Spec.from_dict(found.to_dict()) == found == load_spec(found.to_dict())
    verify_record(found, place(found))


def test_a_name_stands_for_its_keys_and_gives_way_to_them() -> None:
    plain = {"format": "e2m1", "group": ROW | {"d": 16}, "scale_dtype": "e4m3", "outer": {}}
    assert spec({"format": "nvfp4"}) == spec(plain)
    assert spec({"format": "mxfp4", "group": ROW | {"d": 16}}).cache.k.d_block == 16


@pytest.mark.parametrize("place_of", ["page", "pool"])
def test_bytes_of_a_page_are_those_of_its_bits(place_of: str) -> None:
    """Four bits and an f16 scale and minimum for 32 numbers are five bits a number; three bits cost three."""
    four = {"format": "int4", "affine": True, "scale_dtype": "f16", "scales": place_of}
    kivi = spec(four | {"group": CHANNEL}, four | {"group": ROW | {"d": 32}})
    assert place(kivi).page_bytes() * 8 == 5 * 2 * 32 * 2 * 64
    three = spec({"format": "int3", "group": CHANNEL, "scale_dtype": "f16", "scales": place_of})
    codes = sum(p.axes[-1].extent or 0 for p in place(three).planes if p.name in ("k", "k_top"))
    assert codes * 8 == 3 * 64


def test_rows_of_fp8_and_bf16_take_656_bytes() -> None:
    parts = [
        {"size": 512, "format": "e4m3", "group": ROW | {"d": 128}},
        {"size": 64, "format": "bf16"},
    ]
    wide = {"q_heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
    k = {"segments": parts, "scales": "inline"}
    found = spec(k, {"alias": "k"}, align=16, attention=wide)
    record = place(found)
    verify_record(found, record)
    assert record.page_bytes() == 656 * 32
    assert [part.plane for part in found.segments("k")] == ["k", "k1"]
    assert [(part.plane, part.size) for part in found.segments("v")] == [("k", 512)]


def test_raw_rows_follow_from_groups_and_from_what_is_kept() -> None:
    assert spec({"format": "int8"}).cache.raw is None
    assert spec({"format": "int8"}, keep_last=5).cache.raw == RawSpec(0, 5, 1, 32)
    both = spec(
        {"format": "int4", "group": {"tok": 4, "head": 1}}, {"format": "int8", "group": CHANNEL | {"tok": 8}}
    )
    raw = both.cache.raw
    assert raw == RawSpec(0, 0, 8, 32)
    assert [raw.closed_end(n) for n in (0, 7, 8, 17)] == [0, 0, 8, 16]
    kept = RawSpec(4, 32, 32, 32)
    assert kept.pages(100) == (0, 2, 3) and kept.pages(0) == () and kept.pages(3) == (0,)
    assert [t for t in range(70) if kept.is_raw(t, 70)] == [*range(4), *range(32, 70)]


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"format": "bf16", "affine": True}, "cache.k.affine", "stores values"),
    ({"format": "e4m3", "affine": True}, "cache.k.affine", "no integer codes"),
    ({"format": "int8", "affine": True, "scale_dtype": "e8m0"}, "cache.k.scale_dtype", "minimum"),
    ({"format": "int8", "affine": True, "group": {}}, "cache.k.affine", "put tok into the group"),
    ({"format": "int8", "group": {}, "scale_dtype": "f16"}, "cache.k.scale_dtype", "given are f32"),
    ({"format": "int8", "group": {}, "scales": "pool"}, "cache.k.scales", "outside the pages"),
    ({"format": "int8", "group": {"head": 1}, "outer": {}}, "cache.k.outer", "an append finds"),
    ({"format": "int8", "outer": {"tok": 1}}, "cache.k.outer", "one number, or one per head"),
    ({"format": "int8", "scales": "inline", "group": CHANNEL}, "cache.k.scales", "cannot lie behind"),
    ({"format": "int8", "scales": "inline", "layout": "tok d head"}, "cache.k.layout", "innermost"),
    ({"format": "int8", "group": CHANNEL | {"tok": 5}}, "cache.k.group.tok", "does not divide"),
    ({"format": "int8", "group": CHANNEL | {"d": 8}}, "cache.k.group.d", "nor 1"),
    ({"format": "table"}, "cache.k.levels", "ascending"),
    ({"format": "table", "levels": [0.0, 2.0, 1.0]}, "cache.k.levels", "ascending"),
    ({"format": "table", "levels": [0.0, 1.0]}, "cache.k.levels", "3 to 16"),
    ({"format": "table", "levels": [0.0, 1.0, float("nan")]}, "cache.k.levels", "finite"),
    ({"format": "table", "levels": [0.0, 1.0, 10**400]}, "cache.k.levels", "finite"),
    ({"format": "int4", "levels": [0.0, 1.0, 2.0]}, "cache.k.levels", "has its own"),
    ({"format": "lloyd2", "scale_dtype": "e8m0"}, "cache.k.scale_dtype", "mean square"),
    ({"segments": [{"size": 64, "format": "int8"}]}, "cache.k.segments", "2 to 8"),
    ({"segments": [{"size": 8, "format": "int8"}] * 2}, "cache.k.segments[0].size", "multiple of 16"),
    ({"segments": [{"size": 16, "format": "int8"}] * 2}, "cache.k.segments", "32 elements together"),
    ({"segments": [HALF | {"group": CHANNEL}] * 2}, "cache.k.segments[0].group", "whole rows"),
    ({"segments": [HALF] * 2, "format": "int8"}, "cache.k.format", "each segment"),
]  # fmt: skip
"""[cache.k], the path of its mistake, and a part of the reason."""


@pytest.mark.parametrize(("k", "path", "reason"), MISTAKES)
def test_one_mistake(k: dict[str, Any], path: str, reason: str) -> None:
    found = mistakes(k)
    assert reason in found[path], found


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"v": {"format": "int8", "mean": True}}, "cache.v.mean"),
        ({"keep_first": 1, "k": {"format": "bf16"}}, "cache.keep_first"),
        ({"keep_last": -1}, "cache.keep_last"),
        (
            {"attention": {"head_dim": 96}, "k": {"format": "int8", "transform": "hadamard"}},
            "cache.k.transform",
        ),
        ({"attention": {"rope": {"stored": "pre"}}, "k": {"format": "int8", "mean": True}}, "cache.k.mean"),
        ({"v": {"alias": "k"}, "k": {"format": "int8", "transform": "hadamard"}}, "cache.k.transform"),
        ({"v": {"format": "int8", "affine": True}, "attention": {"pv": "int8"}}, "attention.pv"),
        ({"v": {"format": "int8"}, "keep_last": 4, "attention": {"pv": "int8"}}, "attention.pv"),
        ({"k": {"format": "e2m1"}, "attention": {"qk": "int8"}}, "attention.qk"),
    ],
)
def test_what_does_not_go_together(more: dict[str, Any], path: str) -> None:
    assert path in mistakes(more.pop("k", {"format": "int8"}), more.pop("v", None), **more)


def test_blocks_of_k_and_v_close_together_within_a_page() -> None:
    """Divisors of a page have a common multiple that divides it too: what each side asks for is enough."""
    k, v = ({"format": "int8", "group": {"tok": n, "head": 1}} for n in (3, 10))
    assert spec(k, v, page_size=60).cache.raw == RawSpec(0, 0, 30, 60)
