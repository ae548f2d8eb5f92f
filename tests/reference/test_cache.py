"""The oracle over bytes: layouts round trip, appends touch their own bytes, poison never leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import reference as ref
from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord, Spec
from kvgen.ir.quant import Format
from kvgen.passes.place import place
from tests.support.records import byte_of
from tests.support.specs import FORMAT_TABLES, LAYOUTS, covering_specs, make_spec, specs

PAGES = 7


def static_scales(spec: Spec, rng: Any) -> dict[str, Any]:
    shapes = {f: (spec.attention.kv_heads,) if spec.cache.quant(f).scale_dims else () for f in "kv"}
    return {f: rng.uniform(0.01, 0.05, shapes[f]).astype(np.float32) for f in "kv"}


def tokens(spec: Spec, rng: Any, count: int) -> tuple[Any, Any]:
    att = spec.attention
    k = rng.standard_normal((count, att.kv_heads, att.head_dim)).astype(np.float32)
    return k, rng.standard_normal((count, att.kv_heads, att.v_head_dim)).astype(np.float32)


def slots_of(spec: Spec, pages: list[int], length: int) -> Any:
    at = np.arange(length)
    return (
        np.array(pages, np.int64)[at // spec.cache.page_size] * spec.cache.page_size
        + at % spec.cache.page_size
    )


@settings(max_examples=40)
@given(specs())
def test_views_read_the_byte_that_brute_force_names(spec: Spec) -> None:
    """unpack against plain address sums (not numpy strides), and pack as its inverse, padding untouched."""
    record = place(spec)
    rng = np.random.default_rng(0)
    pools = {name: rng.integers(0, 256, size.at(2), dtype=np.uint8) for name, size in record.pools}
    logical = ref.unpack(pools, record, 2)
    for plane in record.planes:
        first = byte_of(plane, 2)
        raw = np.stack([pools[plane.pool][first + i] for i in range(plane.itemsize)], axis=-1)
        array = logical[plane.name]
        assert array.tobytes() == np.ascontiguousarray(raw).tobytes()
        blocks = any(a.axis.dim == "d" for a in plane.axes)
        assert array.ndim == (4 if blocks else 3)
    packed = ref.pack(logical, record, 2, ref.new_pools(record, 2, fill=0xA5))
    again = ref.unpack(packed, record, 2)
    assert all(again[name].tobytes() == logical[name].tobytes() for name in logical)
    used = {name: np.zeros(size.at(2), bool) for name, size in record.pools}
    for plane in record.planes:
        for i in range(plane.itemsize):
            used[plane.pool][byte_of(plane, 2) + i] = True
    assert all((packed[name][~used[name]] == 0xA5).all() for name in packed)


@settings(max_examples=40)
@given(st.data(), specs())
def test_an_append_changes_its_own_bytes_and_no_other(data: st.DataObject, spec: Spec) -> None:
    record, rng = place(spec), np.random.default_rng(1)
    total = PAGES * spec.cache.page_size
    slots = data.draw(
        st.lists(
            st.integers(0, total - 1) | st.just(-1), max_size=6, unique_by=lambda s: s if s >= 0 else object()
        )
    )
    k, v = tokens(spec, rng, len(slots))
    pools = ref.new_pools(record, PAGES, fill=0x5A)
    before = {name: pool.copy() for name, pool in pools.items()}
    ref.append(spec, record, pools, PAGES, k, v, slots, scales=static_scales(spec, rng))
    mine = {name: np.zeros(pool.size, bool) for name, pool in pools.items()}
    for plane in record.planes:
        page, tok = np.divmod([s for s in slots if s >= 0], spec.cache.page_size)
        first = byte_of(plane, PAGES)
        first = first[page.astype(int), :, tok.astype(int) if first.shape[2] > 1 else 0]
        for i in range(plane.itemsize):
            mine[plane.pool][first + i] = True
    for name, pool in pools.items():
        assert np.array_equal(pool[~mine[name]], before[name][~mine[name]])


@pytest.mark.parametrize("name", FORMAT_TABLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_returns_what_was_appended(layout: str, name: str) -> None:
    """Over permuted and shared pages, at every length around a page; poison everywhere else."""
    spec = make_spec(name, name, layout, page_size=8, kv_heads=2, head_dim=32)
    record, rng = place(spec), np.random.default_rng(2)
    scales = static_scales(spec, rng)
    k, v = tokens(spec, rng, 20)
    pools = ref.new_pools(record, PAGES, fill=0xFF)
    ref.append(spec, record, pools, PAGES, k, v, slots_of(spec, [5, 0, 3], 20), scales=scales)
    lens = [0, 1, 7, 8, 9, 20]
    table = [[], [5, 99], [5], [5, -7], [5, 0], [5, 0, 3]]
    ks, vs = ref.gather(spec, record, pools, PAGES, table, lens, scales=scales)
    fmt = spec.cache.k.fmt
    step = {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11}.get(name)
    for n, got_k, got_v in zip(lens, ks, vs, strict=True):
        for got, x, field in ((got_k, k[:n], "k"), (got_v, v[:n], "v")):
            if step is not None:
                bound: Any = step * np.abs(x)
            elif name.endswith(("token", "block")):
                bound = half_step(fmt, np.abs(x), np.abs(x).max(-1, keepdims=True) / fmt.qmax)
            else:
                scale = np.broadcast_to(scales[field], (2,))[:, None]
                bound = np.maximum(half_step(fmt, np.abs(x), scale), np.abs(x) - fmt.qmax * scale + 1e-6)
            assert got.shape == x.shape and (np.abs(got - x) <= bound).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMAT_TABLES)
def test_odd_values_stay_in_their_row(name: str, bad: float) -> None:
    """Conformance 20: one element of one (token, head) row; all other rows read back as without it."""
    spec = make_spec(name, name, "nhd", page_size=4, kv_heads=2, head_dim=32)
    record, rng = place(spec), np.random.default_rng(3)
    scales, (k, v) = static_scales(spec, rng), tokens(spec, np.random.default_rng(4), 6)
    clean, odd = ref.new_pools(record, PAGES), ref.new_pools(record, PAGES)
    slots = slots_of(spec, [6, 2], 6)
    ref.append(spec, record, clean, PAGES, k, v, slots, scales=scales)
    k[3, 1, 7] = v[2, 0, 0] = bad
    ref.append(spec, record, odd, PAGES, k, v, slots, scales=scales)
    both = [ref.gather(spec, record, pools, PAGES, [[6, 2]], [6], scales=scales) for pools in (clean, odd)]
    for field, (token, head) in enumerate(((3, 1), (2, 0))):
        a, b = both[0][field][0], both[1][field][0]
        rest = np.ones((6, 2), bool)
        rest[token, head] = False
        assert np.array_equal(a[rest], b[rest])
        fmt = spec.cache.k.fmt
        if name.endswith("token"):
            assert np.isnan(b[token, head]).all()
        elif name.endswith("block"):
            assert np.isnan(b[token, head, :16]).all() and not np.isnan(b[token, head, 16:]).any()
        elif fmt.scaled:
            top = fmt.qmax * np.broadcast_to(scales["kv"[field]], (2,))[head].astype(np.float64)
            stored = (0.0 if fmt.integer else np.nan) if np.isnan(bad) else np.copysign(top, bad)
            assert np.array_equal(b[token, head, (7, 0)[field]], stored, equal_nan=True)
        else:
            assert np.array_equal(b[token, head, (7, 0)[field]], bad, equal_nan=True)


def half_step(fmt: Format, size: Any, scale: Any) -> Any:
    """The largest error of rounding values of ``size`` to codes: a code's, or e4m3's 2**-4 relative."""
    if fmt.integer:
        return scale * 0.5001 + 0 * size
    return np.maximum(size * 2.0**-4, scale * 2.0**-10) * 1.0001


def filled(spec: Spec, lens: list[int], rng: Any) -> tuple[PageRecord, Any, int, list[list[int]], Any]:
    """A pool of NaN in which only the tokens of the requests are written, pages in random order."""
    record, size = place(spec), spec.cache.page_size
    need = [-(-n // size) for n in lens]
    pages = sum(need) + 2
    order = rng.permutation(pages).tolist()
    table = [[order.pop() for _ in range(n)] for n in need]
    pools, scales = ref.new_pools(record, pages, fill=0xFF), static_scales(spec, rng)
    for row, n in zip(table, lens, strict=True):
        ref.append(spec, record, pools, pages, *tokens(spec, rng, n), slots_of(spec, row, n), scales=scales)
    return record, pools, pages, [[*row, -1, 2**31 - 1] for row in table], scales


SMALL = covering_specs(5, head_dim=(32, 72, 112), page_size=(1, 5, 16), kv_heads=(1, 4))


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_decode_equals_prefill_and_no_poison_comes_out(spec: Spec) -> None:
    """Conformance 5, 7, 13: ragged with empty requests, NaN in every unused slot, surplus table entries."""
    rng = np.random.default_rng(6)
    lens = [0, 1, spec.cache.page_size, 17]
    record, pools, pages, table, scales = filled(spec, lens, rng)
    q = rng.standard_normal((len(lens), spec.attention.q_heads, spec.attention.head_dim))
    out, lse = ref.decode(spec, record, pools, pages, table, lens, q, scales=scales)
    assert (
        np.isfinite(out).all()
        and (out[0] == 0).all()
        and (lse[0] == -np.inf).all()
        and np.isfinite(lse[1:]).all()
    )
    many = np.concatenate([rng.standard_normal((2, *q.shape[1:])), q[3:]])
    out3, lse3 = ref.prefill(spec, record, pools, pages, table[3:], lens[3:], many, [0, 3], scales=scales)
    assert np.allclose(out3[2], out[3], rtol=1e-12) and np.allclose(lse3[2], lse[3], rtol=1e-12)


def test_layouts_of_the_same_tokens_agree_in_every_bit() -> None:
    results = []
    for layout in LAYOUTS:
        spec, rng = (
            make_spec("int8-token", "bf16", layout, page_size=5, kv_heads=2, group=3),
            np.random.default_rng(7),
        )
        record, pools, pages, table, _ = filled(spec, [13], rng)
        q = np.random.default_rng(8).standard_normal((1, 6, 64))
        results.append(ref.decode(spec, record, pools, pages, table, [13], q))
    assert all(np.array_equal(a, results[0][0]) and np.array_equal(b, results[0][1]) for a, b in results)


def test_copy_moves_pages_with_their_scales() -> None:
    spec, rng = make_spec("int8-token", "f16", "halves-nhd", page_size=4), np.random.default_rng(9)
    record, pools, pages, table, _ = filled(spec, [4, 4], rng)
    before = ref.unpack(pools, record, pages)
    (a,), (b,) = table[0][:1], table[1][:1]
    free = next(p for p in range(pages) if p not in (a, b))
    ref.copy(record, pools, pages, [a], [free])
    after = ref.unpack(pools, record, pages)
    for name, array in before.items():
        array[free] = array[a]
        assert array.tobytes() == after[name].tobytes()
    for src, dst in (([a, b], [free, free]), ([a, free], [free, b]), ([a], [pages]), ([a], [])):
        with pytest.raises(ArgumentError):
            ref.copy(record, pools, pages, src, dst)


def test_wrong_arguments_are_refused() -> None:
    spec, rng = make_spec("int8-head", "bf16", page_size=4), np.random.default_rng(10)
    record = place(spec)
    pools, scales = ref.new_pools(record, 3), static_scales(spec, rng)
    k, v = tokens(spec, rng, 2)
    for slots, given_scales, match in (
        ([0, 12], scales, "slots must be"),
        ([0, -2], scales, "slots must be"),
        ([5, 5], scales, "twice"),
        ([0], scales, "expected"),
        ([0, 1], None, "missing"),
        ([0, 1], {"k": np.float32(1)}, "expected"),
    ):
        with pytest.raises(ArgumentError, match=match):
            ref.append(spec, record, pools, 3, k, v, slots, scales=given_scales)
    for table, lens in (([[3]], [1]), ([[-1]], [1]), ([[0]], [5]), ([[0]], [-1])):
        with pytest.raises(ArgumentError, match="request 0"):
            ref.gather(spec, record, pools, 3, table, lens, scales=scales)
    with pytest.raises(ArgumentError, match="pool kv"):
        ref.unpack({"kv": pools["kv"][:-1]}, record, 3)
    with pytest.raises(ArgumentError, match="k: expected"):
        ref.pack({"k": np.zeros((3, 2, 4, 64), np.uint8)}, record, 3)


def test_nothing_to_do_is_legal() -> None:
    spec = make_spec("bf16", "bf16", page_size=4)
    record = place(spec)
    pools = ref.new_pools(record, 0)
    ref.append(spec, record, pools, 0, np.zeros((0, 2, 64), np.float32), np.zeros((0, 2, 64), np.float32), [])
    out, lse = ref.decode(spec, record, pools, 0, [], [], np.zeros((0, 2, 64)))
    assert out.shape == (0, 2, 64) and lse.shape == (0, 2)
    out, lse = ref.decode(spec, record, pools, 0, [[]], [0], np.zeros((1, 2, 64)))
    assert (out == 0).all() and (lse == -np.inf).all()
    assert {k: a.shape for k, a in ref.unpack(pools, record, 0).items()} == {
        "k": (0, 2, 4, 64),
        "v": (0, 2, 4, 64),
    }
