"""Tokens left unquantised and blocks that close: bytes do not depend on how appends are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import reference as ref
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.reference.blocks import dequantise, quantise
from kvgen.reference.layout import raw_view
from kvgen.reference.raw import reopen
from kvgen.reference.stored import from_stored, raw_numbers, to_stored

F32, PAGES, SIZE, HEADS, DIM = np.float32, 9, 8, 2, 32
CHANNEL = {"format": "int2", "affine": True, "group": {"head": 1, "tok": 4, "d": 1}}
"""KIVI's K: a channel over a block of tokens."""
ROWS = {"format": "int2", "affine": True, "group": {"head": 1, "tok": 1, "d": 16}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "kivi": (CHANNEL, ROWS, {"keep_last": 5}),
    "open block only": (CHANNEL | {"scale_dtype": "f16"}, {"format": "bf16"}, {}),
    "both span": (
        {"format": "int4", "group": {"head": 1, "tok": 2}},
        CHANNEL | {"format": "int3"},
        {"keep_first": 3},
    ),
    "protected rows": ({"format": "int8"}, {"format": "e4m3"}, {"keep_first": 10, "keep_last": 3}),
    "rotated": (CHANNEL | {"transform": "hadamard", "mean": True}, ROWS, {"keep_first": 1, "keep_last": 9}),
    "inside a block": (CHANNEL | {"format": "lloyd3", "affine": False}, ROWS, {"keep_first": 6}),
}
each_case = pytest.mark.parametrize("case", CASES)


def make(case: str, dtype: str = "bf16") -> Spec:
    k, v, cache = CASES[case]
    heads = {"q_heads": 4, "kv_heads": HEADS, "head_dim": DIM, "q_dtype": dtype}
    return load_spec({"attention": heads, "cache": {"page_size": SIZE, "k": k, "v": v, **cache}})


class Requests:
    """A pool of poison with requests on permuted pages; every page has a raw row, in another order."""

    def __init__(self, spec: Spec, count: int = 2, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.spec, self.record, self.lens = spec, place(spec), [0] * count
        order = rng.permutation(PAGES).tolist()
        self.table = [[order.pop() for _ in range(4)] + [-1, 2**31 - 1] for _ in range(count)]
        self.raw_rows = rng.permutation(PAGES + 1)[:PAGES].astype(np.int32)
        self.pools = ref.new_pools(self.record, PAGES, fill=0xFF)
        self.pools["raw"] = np.full((PAGES + 1) * self.record.raw_bytes(), 0xFF, np.uint8)
        self.known: dict[str, Any] = {}
        if spec.cache.k.mean:
            self.known["means"] = {"k": rng.standard_normal((HEADS, DIM)).astype(F32)}

    def append(self, rows: list[tuple[Any, Any]]) -> None:
        self.lens = [n + len(k) for n, (k, _) in zip(self.lens, rows, strict=True)]
        starts = np.cumsum([0, *(len(k) for k, _ in rows)])
        k, v = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        ref.append_requests(
            self.spec,
            self.record,
            self.pools,
            PAGES,
            k,
            v,
            self.table,
            self.lens,
            starts,
            self.raw_rows,
            **self.known,
        )

    def gather(self) -> tuple[Any, Any]:
        return ref.gather(
            self.spec,
            self.record,
            self.pools,
            PAGES,
            self.table,
            self.lens,
            raw_rows=self.raw_rows,
            **self.known,
        )


def tokens(count: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((count, HEADS, DIM)).astype(F32) + F32(0.4) for _ in "kv")
    return k, v


def wanted(held: Requests, field: str, x: Any, length: int) -> Any:
    """What a request of ``length`` tokens reads back as, token by token, from the rule alone."""
    spec, known = held.spec, held.known.get("means")
    raw, quant = spec.cache.raw, spec.cache.quant(field)
    stored = to_stored(spec, field, x, known, None, None)
    assert np.array_equal(
        stored, raw_numbers(ref.store_float(stored, spec.attention.q_dtype), spec.attention.q_dtype)
    )
    keep_first, closed = spec.cache.keep_first, max(0, length - spec.cache.keep_last)
    closed -= closed % raw.block
    found = stored.astype(np.float64)
    if quant.fmt.scaled:
        span = quant.tok_block
        for start in range(0, closed, span):
            kept = np.arange(start, start + span) >= keep_first
            if kept.any():
                coded = quantise(stored[start : start + span], quant, kept=kept)
                parts = [None if p is None else p.transpose(1, 0, 2) for p in (coded.scale, coded.low)]
                values = dequantise(coded.codes.transpose(1, 0, 2), quant, *parts, None).transpose(1, 0, 2)
                found[start : start + span][kept] = values[kept]
    else:
        stop = slice(keep_first, closed)
        found[stop] = ref.widen(ref.store_float(stored[stop], quant.format))
    return from_stored(spec, field, found.transpose(1, 0, 2), known).transpose(1, 0, 2)


@each_case
@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 9, 16, 17, 31])
def test_a_token_reads_back_as_the_rule_says(case: str, length: int) -> None:
    held = Requests(make(case))
    rows = [tokens(length, 1), tokens(5, 2)]
    held.append(rows)
    for side, found in enumerate(held.gather()):
        for b, n in enumerate((length, 5)):
            assert np.array_equal(found[b], wanted(held, "kv"[side], rows[b][side], n))
            assert not np.isnan(found[b]).any()


@each_case
@settings(max_examples=10)
@given(
    dtype=st.sampled_from(["f32", "bf16", "f16"]),
    cuts=st.lists(st.tuples(st.integers(0, 23), st.integers(0, 14)), max_size=5),
)
def test_bytes_do_not_depend_on_how_appends_are_cut(
    case: str, dtype: str, cuts: list[tuple[int, int]]
) -> None:
    """All codes and scales, and every raw row that is still read, whatever was appended together."""
    whole, parts = (Requests(make(case, dtype)) for _ in range(2))
    rows = [tokens(23, 3), tokens(14, 4)]
    whole.append(rows)
    ends = [sorted([*(cut[b] for cut in cuts), (23, 14)[b]]) for b in range(2)]
    for now in zip(*ends, strict=True):
        sections = [slice(a, b) for a, b in zip(parts.lens, now, strict=True)]
        parts.append([(k[part], v[part]) for (k, v), part in zip(rows, sections, strict=True)])
        for side, found in enumerate(parts.gather()):
            for b, n in enumerate(now):
                assert np.array_equal(found[b], wanted(parts, "kv"[side], rows[b][side][:n], n))
    for name, pool in whole.pools.items():
        if name != "raw":
            assert np.array_equal(pool, parts.pools[name])


@each_case
def test_an_append_writes_open_rows_and_closed_blocks_and_no_other_byte(case: str) -> None:
    """Pages of the other request, protected tokens and all that stays open keep their bytes."""
    held = Requests(make(case))
    k, v = tokens(13, 5)
    held.append([(k, v), tokens(6, 6)])
    before = {name: pool.copy() for name, pool in held.pools.items()}
    more = tokens(7, 7)
    held.append([more, tuple(x[:0] for x in tokens(1, 8))])
    raw, mine = held.spec.cache.raw, set(held.table[0][:4])
    fresh = range(raw.closed_end(13), raw.closed_end(20))
    for plane in held.record.planes:
        now, old = (ref.view(p, held.record, plane.name, PAGES).view(np.uint8) for p in (held.pools, before))
        changed = (now != old).any(axis=tuple(range(1, now.ndim)))
        assert set(np.flatnonzero(changed).tolist()) <= mine
        if plane.name in ("k", "v"):
            for t in set(range(20)) - set(fresh) | set(range(raw.keep_first - raw.keep_first % raw.block)):
                page = held.table[0][t // SIZE]
                assert np.array_equal(now[page, :, t % SIZE], old[page, :, t % SIZE])
    for side in "kv":
        now, old = (raw_view(p, held.record, f"{side}_raw") for p in (held.pools, before))
        new_raw = {t for t in range(13, 20) if raw.is_raw(t, 20)}
        places = {(int(held.raw_rows[held.table[0][t // SIZE]]), t % SIZE) for t in new_raw}
        bits = np.uint8
        changed = (now.copy().view(bits) != old.copy().view(bits)).any(axis=(1, 3))
        assert set(zip(*np.nonzero(changed), strict=True)) == places


@each_case
def test_only_pages_with_raw_tokens_need_a_raw_row(case: str) -> None:
    held = Requests(make(case), count=1)
    k, v = tokens(30, 9)
    raw = held.spec.cache.raw
    for old, new in ((0, 11), (11, 12), (12, 24), (24, 30)):
        # Before it and after it: what closes now is read from the rows in which it lay.
        needed = {held.table[0][i] for n in (old, new) for i in raw.pages(n)}
        rows = held.raw_rows.copy()
        held.raw_rows[[p not in needed for p in range(PAGES)]] = -1
        held.append([(k[old:new], v[old:new])])
        after = {held.table[0][i] for i in raw.pages(new)}
        held.raw_rows[[p not in after for p in range(PAGES)]] = -1
        (found,), _ = held.gather()
        assert np.array_equal(found, wanted(held, "k", k[:new], new))
        held.raw_rows = rows
    held.raw_rows[held.table[0][raw.pages(30)[-1]]] = -1
    with pytest.raises(ArgumentError, match="no raw row"):
        held.gather()


@each_case
def test_truncation_reopens_blocks_with_what_their_codes_say(case: str) -> None:
    held = Requests(make(case, "f32"))
    rows = [tokens(29, 10), tokens(12, 11)]
    held.append(rows)
    before = held.gather()
    for new in ([22, 12], [17, 5], [16, 4], [3, 0]):
        where = (held.spec, held.record, held.pools, PAGES, held.table)
        reopen(*where, held.lens, new, held.raw_rows)
        held.lens = new
        for old, now in zip(before, held.gather(), strict=True):
            for b, n in enumerate(new):
                assert np.allclose(now[b], old[b][:n], rtol=1e-6, atol=1e-6)
    held.append([tokens(20, 12), tokens(9, 13)])
    (found, other), _ = held.gather()
    assert np.allclose(found[:3], before[0][0][:3], atol=0.9) and not np.isnan(found).any()
    assert np.array_equal(other, wanted(held, "k", tokens(9, 13)[0], 9))


@each_case
def test_attention_reads_raw_and_closed_tokens_in_one_call(case: str) -> None:
    held = Requests(make(case))
    held.append([tokens(21, 14), tokens(4, 15)])
    q = np.random.default_rng(16).standard_normal((2, 4, DIM)).astype(F32)
    where = (held.spec, held.record, held.pools, PAGES, held.table, held.lens)
    out, lse = ref.decode(*where, q, raw_rows=held.raw_rows, **held.known)
    keys, values = held.gather()
    want, want_lse = ref.attend(q, keys, values, q_starts=[0, 1, 2], scale=held.spec.attention.scale)
    assert np.array_equal(out, want) and np.array_equal(lse, want_lse)
    with pytest.raises(ArgumentError, match="raw_rows is missing"):
        ref.decode(*where, q, **held.known)


def test_a_nan_stays_in_its_block_and_raw_rows_keep_it() -> None:
    """In the open block only its own element is NaN; closed, all that shares its scale."""
    held = Requests(make("kivi"), count=1)
    k, v = tokens(14, 17)
    k[2, 1, 5] = np.nan
    held.append([(k[:4], v[:4])])
    (found,), _ = held.gather()
    assert np.argwhere(np.isnan(found)).tolist() == [[2, 1, 5]]
    held.append([(k[4:], v[4:])])
    (found,), _ = held.gather()
    assert np.argwhere(np.isnan(found)).tolist() == [[t, 1, 5] for t in range(4)]
