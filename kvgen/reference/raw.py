"""raw: tokens that are left unquantised, and blocks that close (``kvgen.ir.RawSpec`` holds the rule).

``pools["raw"]`` is the slab of raw rows, uint8, ``record.raw_bytes()`` for each; ``raw_rows`` int32
[num_pages] says which of them holds a page's raw tokens, -1 for none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord, Spec
from kvgen.reference.codec import Array, store_float
from kvgen.reference.layout import Pools, raw_view
from kvgen.reference.stored import Given, raw_numbers, to_stored, write_rows

Ints = Sequence[int] | Array


def append_raw(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    rows: dict[str, Array],
    page_table: Sequence[Ints] | Array,
    kv_lens: Ints,
    q_starts: Ints,
    raw_rows: Array,
    *,
    scales: Given = None,
    means: Given = None,
    rope_table: Array | None = None,
) -> None:
    """Store the new tokens of each request, k and v [T, kv_heads, d], in place.

    ``kv_lens`` [B] counts tokens after this append, ``q_starts`` [B + 1] says which rows are whose. New
    tokens that are raw now go to their page's raw row; blocks that are full and old enough now become
    codes, from the values as raw rows hold them.
    """
    raw = spec.cache.raw
    assert raw is not None
    size = raw.page_size
    for b, length in enumerate(int(n) for n in kv_lens):
        new = slice(int(q_starts[b]), int(q_starts[b + 1]))
        old = length - (new.stop - new.start)
        pages = np.array([int(p) for p in page_table[b][: -(-length // size)]], dtype=np.int64)
        positions = np.arange(old, length)
        for field in spec.cache.fields:
            x = to_stored(spec, field, rows[field][new], means, positions, rope_table)
            store = _RawRows(spec, record, pools, field, pages, raw_rows)
            start, end = raw.closed_end(old), raw.closed_end(length)
            blocks = np.arange(start, max(start, end))
            values = (
                np.stack([x[t - old] if t >= old else store.read(int(t)) for t in blocks])
                if len(blocks)
                else x[:0]
            )
            for t in positions:
                if raw.is_raw(int(t), length):
                    store.write(int(t), x[t - old])
            _close(spec, record, pools, num_pages, field, pages, blocks, values, scales)


def _close(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    field: str,
    pages: Array,
    tokens: Array,
    values: Array,
    scales: Given,
) -> None:
    """Tokens, whole blocks of them, become codes; those that are protected take no part."""
    raw = spec.cache.raw
    assert raw is not None
    for part in spec.segments(field):
        span = max(1, part.quant.tok_block)
        open_ = (tokens >= raw.keep_first).reshape(-1, span)
        live = np.repeat(open_.any(axis=1), span)  # a block of which no token becomes a code is left alone
        if live.any():
            own = tokens[live]
            places = (pages[own // raw.page_size], own % raw.page_size)
            x = values[live][..., part.start : part.start + part.size]
            kept = own >= raw.keep_first
            write_rows(spec, record, pools, num_pages, part, x, places, scales, kept)


class _RawRows:
    """The raw tokens of one request."""

    def __init__(
        self, spec: Spec, record: PageRecord, pools: Pools, field: str, pages: Array, raw_rows: Array
    ) -> None:
        self.plane = raw_view(pools, record, f"{field}_raw")
        self.dtype, self.size = spec.attention.q_dtype, spec.cache.page_size
        self.pages, self.raw_rows = pages, raw_rows

    def _place(self, token: int) -> tuple[int, int]:
        page = int(self.pages[token // self.size])
        row = int(self.raw_rows[page])
        if not 0 <= row < len(self.plane):
            raise ArgumentError(f"page {page} holds raw token {token} and has no raw row ({row})")
        return row, token % self.size

    def read(self, token: int) -> Array:
        """f32 [head, d]."""
        row, tok = self._place(token)
        return raw_numbers(self.plane[row, :, tok], self.dtype)

    def write(self, token: int, x: Array) -> None:
        row, tok = self._place(token)
        self.plane[row, :, tok] = store_float(x, self.dtype)


def read_raw(
    spec: Spec, record: PageRecord, pools: Pools, field: str, pages: Array, length: int, raw_rows: Array
) -> dict[int, Array]:
    """token -> f64 [head, d], as it is stored: every raw token of a request with ``length`` tokens."""
    raw = spec.cache.raw
    assert raw is not None
    store = _RawRows(spec, record, pools, field, pages, raw_rows)
    return {t: store.read(t).astype(np.float64) for t in range(length) if raw.is_raw(t, length)}


def reopen(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    page_table: Sequence[Ints] | Array,
    old_lens: Ints,
    new_lens: Ints,
    raw_rows: Array,
    *,
    scales: Given = None,
) -> None:
    """Truncate requests: tokens that are raw at the new length and were codes at the old one are written to
    their raw rows, as their codes say (rounded to the query's type)."""
    from kvgen.reference.stored import read_pages

    raw = spec.cache.raw
    assert raw is not None
    for b, (old, new) in enumerate(zip(map(int, old_lens), map(int, new_lens), strict=True)):
        pages = np.array([int(p) for p in page_table[b][: -(-old // raw.page_size)]], dtype=np.int64)
        for field in spec.cache.fields:
            store = _RawRows(spec, record, pools, field, pages, raw_rows)
            for t in range(max(raw.keep_first, raw.closed_end(new)), min(new, raw.closed_end(old))):
                page = pages[t // raw.page_size : t // raw.page_size + 1]
                values = read_pages(spec, record, pools, num_pages, field, page, scales)
                store.write(t, values[0, :, t % raw.page_size].astype(np.float32))
