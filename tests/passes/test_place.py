"""place: records worked out by hand, and the address of every single element of random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from kvgen.ir import Extent, PageRecord, Spec
from kvgen.passes.place import place, row_stride
from kvgen.passes.validate import load_spec
from tests.support.records import assert_disjoint, byte_of
from tests.support.specs import LAYOUTS, make_spec, specs


@settings(max_examples=60)
@given(specs())
def test_no_two_elements_share_a_byte_and_promised_starts_hold(spec: Spec) -> None:
    record, align = place(spec), spec.cache.align
    for num_pages in (1, 3):
        assert_disjoint(record, num_pages)
        for plane in record.planes:
            assert plane.offset.at(num_pages) % align == 0
            at = byte_of(plane, num_pages)
            assert at.shape[0] == num_pages
            assert (at % plane.itemsize == 0).all()
            row = plane.axes[-1].axis
            if row.dim == "d" and row.part == "whole":
                # A row never straddles a line needlessly: it starts on one, or ends within its own.
                width = at.shape[3] * plane.itemsize
                starts = at[..., 0]
                assert ((starts % align == 0) | (starts % align + width <= align)).all()
                assert (np.diff(at, axis=-1) == plane.itemsize).all()


@settings(max_examples=60)
@given(specs())
def test_each_page_stands_on_its_own_lines_or_shares_one_evenly(spec: Spec) -> None:
    for plane in place(spec).planes:
        pitch = plane.page.stride.fixed
        assert pitch % spec.cache.align == 0 or spec.cache.align % pitch == 0


@pytest.mark.parametrize(
    "row, align, pitch",
    [
        *((128, 64, 128), (144, 64, 192), (64, 64, 64), (65, 64, 128), (32, 64, 32), (33, 64, 64)),
        *((20, 64, 32), (1, 64, 1), (3, 64, 4), (80, 1, 80), (80, 16, 80), (80, 32, 96), (72, 4096, 128)),
        *((5, 2, 6), (4097, 4096, 8192), (3000, 4096, 4096)),
    ],
)
def test_row_stride(row: int, align: int, pitch: int) -> None:
    assert row_stride(row, align) == pitch
    assert not any(s % align == 0 or align % s == 0 for s in range(row, pitch))


def describe(record: PageRecord) -> dict[str, tuple[str, str, list[str]]]:
    return {
        p.name: (p.pool, str(p.offset), [f"{a.axis}={a.stride}{'' if a.constant else '*'}" for a in p.axes])
        for p in record.planes
    }


def test_one_page_record() -> None:
    """int8 K and V with a scale for each token and head, HND, 16 tokens, 2 heads, D 72: rows of 72 in 128."""
    record = place(make_spec("int8-token", "int8-token", "hnd", head_dim=72))
    data, scale = 2 * 16 * 128, 2 * 16 * 4
    page = 2 * (data + scale)
    assert record.pools == (("kv", Extent(0, page)),)
    assert record.page_bytes() == page
    outer = f"page={page}*"
    assert describe(record) == {
        "k": ("kv", "0", [outer, "head=2048", "tok=128", "d=1"]),
        "k_scale": ("kv", f"{data}", [outer, "head=64", "tok=4"]),
        "v": ("kv", f"{data + scale}", [outer, "head=2048", "tok=128", "d=1"]),
        "v_scale": ("kv", f"{2 * data + scale}", [outer, "head=64", "tok=4"]),
    }


def test_two_halves() -> None:
    """vLLM's buffer: K of all pages, then V; 5 tokens of one head of 16 bf16 are 160 bytes, padded to 192."""
    record = place(make_spec("bf16", "bf16", "halves-nhd", page_size=5, kv_heads=1, head_dim=16))
    assert describe(record) == {
        "k": ("kv", "0", ["page=192*", "tok=32", "head=32", "d=2"]),
        "v": ("kv", "192 * num_pages", ["page=192*", "tok=32", "head=32", "d=2"]),
    }
    assert record.pools == (("kv", Extent(0, 384)),)


def test_head_outside_the_page() -> None:
    """Heads left of page step by the pool; short pages of scales share lines instead of filling one each."""
    record = place(make_spec("int8-token", "f32", "head-outside", page_size=1, kv_heads=4, head_dim=64))
    assert describe(record) == {
        "k": ("kv", "0", ["head=64 * num_pages*", "page=64*", "tok=64", "d=1"]),
        "k_scale": ("kv", "256 * num_pages", ["head=4 * num_pages*", "page=4*", "tok=4"]),
        "v": ("kv", "320 * num_pages", ["head=256 * num_pages*", "page=256*", "tok=256", "d=4"]),
    }


def test_two_pools_with_a_packed_k() -> None:
    record = place(make_spec("f16", "f16", "packed-k-two-pools", page_size=8, kv_heads=2, head_dim=32))
    assert describe(record) == {
        "k": ("k", "0", ["page=1024*", "head=512", "d/8=128", "tok=16", "d%8=2"]),
        "v": ("v", "0", ["page=1024*", "head=512", "tok=64", "d=2"]),
    }
    assert record.pools == (("k", Extent(0, 1024)), ("v", Extent(0, 1024)))


def test_record_inside_a_token() -> None:
    """K rows, their scales, V rows of one token side by side; every plane starts on a line."""
    record = place(make_spec("int8-token", "bf16", "token-record", page_size=4, kv_heads=2, head_dim=32))
    assert describe(record) == {
        "k": ("kv", "0", ["page=1024*", "tok=256", "head=32", "d=1"]),
        "k_scale": ("kv", "64", ["page=1024*", "tok=256", "head=4"]),
        "v": ("kv", "128", ["page=1024*", "tok=256", "head=64", "d=2"]),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_static_scales_take_no_room_in_the_pool(layout: str) -> None:
    record = place(make_spec("int8-tensor", "int8-head", layout, page_size=8))
    assert [p.name for p in record.planes] == ["k", "v"]


def test_an_element_never_straddles_its_own_size_even_without_alignment() -> None:
    """align = 1: the f32 scales behind int8 rows still stand on 4 bytes."""
    raw = {"q_heads": 3, "kv_heads": 3, "head_dim": 24}
    cache = {"page_size": 5, "align": 1, "layout": "page tok kv head d"}
    spec = load_spec({"attention": raw, "cache": cache | {"k": {"format": "int8"}, "v": {"format": "int8"}}})
    assert describe(place(spec)) == {
        "k": ("kv", "0", ["page=840*", "tok=168", "head=24", "d=1"]),
        "k_scale": ("kv", "72", ["page=840*", "tok=168", "head=4"]),
        "v": ("kv", "84", ["page=840*", "tok=168", "head=24", "d=1"]),
        "v_scale": ("kv", "156", ["page=840*", "tok=168", "head=4"]),
    }
