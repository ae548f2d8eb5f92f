"""verify: accepts what place makes, and never accepts a record in which bytes really are shared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.errors import KvgenError
from kvgen.ir import Extent, PageRecord, Plane, Spec
from kvgen.ir.verify import VerifyError, smallest_pitch, verify_record
from kvgen.passes.place import place, row_stride
from tests.support.records import assert_disjoint
from tests.support.specs import covering_specs, make_spec, specs


def change(record: PageRecord, name: str, edit: Callable[[Plane], Plane]) -> PageRecord:
    return replace(record, planes=tuple(edit(p) if p.name == name else p for p in record.planes))


def restride(plane: Plane, key: str, stride: Extent) -> Plane:
    axes = tuple(replace(a, stride=stride) if a.axis.key == key else a for a in plane.axes)
    assert axes != plane.axes
    return replace(plane, axes=axes)


def resize(plane: Plane, key: str, extent: int) -> Plane:
    return replace(
        plane, axes=tuple(replace(a, extent=extent) if a.axis.key == key else a for a in plane.axes)
    )


@settings(max_examples=200)
@given(specs())
def test_accepts_every_placed_record(spec: Spec) -> None:
    verify_record(spec, place(spec))


SPEC = make_spec("int8-token", "bf16", "hnd", page_size=16, kv_heads=2, head_dim=72)
HALVES = make_spec("int8-token", "bf16", "halves-nhd", page_size=16, kv_heads=2, head_dim=72)
RECORD, SPLIT = place(SPEC), place(HALVES)


@pytest.mark.parametrize(
    "record, plane, reason",
    [
        (change(RECORD, "v", lambda p: replace(p, offset=Extent(p.offset.fixed + 1))), "v", "not on 64"),
        (
            change(RECORD, "v", lambda p: replace(p, offset=Extent(p.offset.fixed - 64))),
            "k_scale and v",
            "overlap",
        ),
        (change(RECORD, "v", lambda p: replace(p, offset=Extent(p.offset.fixed + 64))), "v", "past its pool"),
        (change(RECORD, "k", lambda p: restride(p, "tok", Extent(72))), "k", "expected 128"),
        (change(RECORD, "k", lambda p: restride(p, "tok", Extent(256))), "k", "expected 128"),
        (change(RECORD, "k", lambda p: restride(p, "d", Extent(2))), "k", "elements 2 bytes apart"),
        (change(RECORD, "k", lambda p: restride(p, "head", Extent(128))), "k", "expected 2048"),
        (
            change(RECORD, "k_scale", lambda p: restride(p, "tok", Extent(2))),
            "k_scale",
            "not a multiple of 4",
        ),
        (change(RECORD, "v", lambda p: restride(p, "page", Extent(64))), "v", "inside a span"),
        (change(RECORD, "v", lambda p: restride(p, "page", Extent(100))), "v", "not a multiple of 64"),
        (change(RECORD, "v", lambda p: restride(p, "page", Extent(64 * 1024))), "v", "past its pool"),
        (change(RECORD, "v", lambda p: restride(p, "page", Extent(0, 64))), "v", "grows with the pool"),
        (change(RECORD, "v", lambda p: resize(p, "head", 3)), "v", "has 3 steps of head"),
        (change(RECORD, "v", lambda p: resize(p, "page", 3)), "v", "has 3 steps of page"),
        (change(RECORD, "v", lambda p: replace(p, dtype="f16")), "v", "holds f16"),
        (change(RECORD, "v", lambda p: replace(p, pool="v")), "v", "lies in v"),
        (change(RECORD, "v", lambda p: replace(p, axes=p.axes[::-1])), "v", "has axes"),
        (replace(RECORD, planes=RECORD.planes[:2]), "record", "planes"),
        (replace(RECORD, planes=(*RECORD.planes, RECORD.planes[0])), "record", "planes"),
        (replace(RECORD, align=32), "record", "align 32"),
        (replace(RECORD, pools=(("k", Extent(0)),)), "record", "pools"),
        (replace(RECORD, pools=(("kv", Extent(0, RECORD.page_bytes() - 64)),)), "k", "past its pool"),
        (replace(RECORD, pools=(("kv", Extent(0, RECORD.page_bytes() + 4)),)), "kv", "does not end on align"),
    ],
)
def test_names_the_plane_that_breaks_a_promise(record: PageRecord, plane: str, reason: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_record(SPEC, record)
    assert str(caught.value).startswith(f"plane {plane}: ")
    assert reason in str(caught.value)


def test_both_coefficients_of_an_offset_count() -> None:
    """An offset that is aligned for one page and not for two; halves that meet only from some size on."""
    odd = change(SPLIT, "v", lambda p: replace(p, offset=Extent(32, p.offset.per_page - 32)))
    with pytest.raises(VerifyError, match=r"plane v: starts at 32"):
        verify_record(HALVES, odd)
    late = change(SPLIT, "v", lambda p: replace(p, offset=Extent(6400, p.offset.per_page - 64)))
    with pytest.raises(VerifyError, match=r"overlap|past its pool"):
        verify_record(HALVES, late)


def test_planes_that_drift_apart_meet_in_the_end() -> None:
    """V's pages 64 bytes further apart than K's, in a pool with room: they meet after some pages."""
    pitch = RECORD.plane("v").page.stride.fixed
    roomy = replace(RECORD, pools=(("kv", Extent(0, 2 * pitch)),))
    verify_record(SPEC, roomy)
    with pytest.raises(VerifyError, match=r"k and v: overlap: they step page by \d+ and page by \d+"):
        verify_record(SPEC, change(roomy, "v", lambda p: restride(p, "page", Extent(pitch + 64))))


def test_constant_flags_must_tell_the_truth() -> None:
    axes = tuple(replace(a, constant=True) for a in RECORD.plane("k").axes)
    with pytest.raises(VerifyError, match=r"plane k: calls the stride of page constant"):
        verify_record(SPEC, change(RECORD, "k", lambda p: replace(p, axes=axes)))


@settings(max_examples=300)
@given(st.data(), specs())
def test_what_passes_after_a_random_change_shares_no_byte(data: st.DataObject, spec: Spec) -> None:
    """Soundness: the proof may refuse a sound record, and may not accept an unsound one."""
    record = place(spec)
    plane = data.draw(st.sampled_from(record.planes))
    step = spec.cache.align * data.draw(st.sampled_from([-8, -2, -1, 0, 1, 2, 8]))
    if data.draw(st.booleans()):
        moved = Extent(max(0, plane.offset.fixed + step), plane.offset.per_page)
        record = change(record, plane.name, lambda p: replace(p, offset=moved))
    if data.draw(st.booleans()):
        a = data.draw(st.sampled_from(plane.axes))
        stride = data.draw(
            st.sampled_from([b.stride for b in plane.axes] + [Extent(a.stride.fixed + abs(step))])
        )
        axes = tuple(replace(b, stride=stride) if b is a else b for b in plane.axes)
        record = change(record, plane.name, lambda p: replace(p, axes=axes))
    try:
        verify_record(spec, record)
    except VerifyError:
        return
    for num_pages in (1, 2, 3):
        assert_disjoint(record, num_pages)


@given(st.integers(1, 9000), st.integers(0, 12))
def test_the_rule_is_restated_rather_than_shared(row: int, bit: int) -> None:
    assert smallest_pitch(row, 1 << bit) == row_stride(row, 1 << bit)


def test_it_is_an_assertion_and_an_error_of_kvgen() -> None:
    assert issubclass(VerifyError, KvgenError)
    assert issubclass(VerifyError, AssertionError)


def test_fast_enough_to_run_in_every_build() -> None:
    pairs = [(spec, place(spec)) for spec in covering_specs()]
    best = 1.0
    for _ in range(3):
        begin = time.perf_counter()
        for spec, record in pairs:
            verify_record(spec, record)
        best = min(best, (time.perf_counter() - begin) / len(pairs))
    assert best < 2e-3
