"""raw_checks: what checked calls on the CPU look at where some tokens are left unquantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.errors import ArgumentError
from kvgen.ir import RawSpec
from kvgen.runtime import arguments as check
from kvgen.runtime.cache import RAW_ROWS

if TYPE_CHECKING:
    from kvgen.runtime.cache import Cache

HINT = (
    "hand rows out with runtime.RawRows([cache]).reserve(pages) (an Engine does), or make the "
    "cache by new_cache() without raw_rows=, where each page has one"
)


def check_append(
    cache: Cache, table: Any, kv_lens: Any, q_starts: Any, total: int, positions: int | None
) -> None:
    """Lengths, page ids, raw rows and angles (``positions`` of them) of an append by requests."""
    raw = cache.spec.cache.raw
    assert raw is not None
    check.check_lens(kv_lens, table, raw.page_size)
    check.check_starts("q_starts", q_starts, total, "k")
    new = kv_lens.numpy().astype(np.int64)
    old = new - np.diff(q_starts.numpy().astype(np.int64))
    if (old < 0).any():
        at = int(np.argmax(old < 0))
        reason = f"{new[at] - old[at]} new rows, and kv_lens counts them too"
        raise ArgumentError(
            f"kv_lens[{at}] = {new[at]}: request {at} has {reason}; give the length after them"
        )
    if positions is not None and (new > positions).any():
        at = int(np.argmax(new > positions))
        known = f"the table of angles has positions 0 to {positions - 1}"
        raise ArgumentError(f"kv_lens[{at}] = {new[at]}: {known}; make a longer rope_table")
    live = new > old
    open_end = closed_end(raw, old)
    # Pages of old tokens that may become codes, and of new ones.
    first = np.where(live, np.minimum(old, np.maximum(open_end, raw.keep_first)), new)
    check.check_pages(table, first // raw.page_size, -(-new // raw.page_size), cache.num_pages)
    closing = np.minimum(closed_end(raw, new), old)
    turned = np.maximum(open_end, raw.keep_first), np.where(live, closing, 0)
    protected = old, np.where(live, np.minimum(new, raw.keep_first), 0)
    fresh = np.maximum(old, closed_end(raw, new)), np.where(live, new, 0)
    _check_apart(cache, need_rows(cache, table, [turned, protected, fresh]))
    _check_owned(raw, table, [turned, (old, new)])


def check_read(cache: Cache, table: Any, kv_lens: Any, first_page: Any) -> None:
    """Every page with raw tokens of a request, from ``first_page`` on, must have a raw row."""
    raw = cache.spec.cache.raw
    assert raw is not None
    lens = kv_lens.numpy().astype(np.int64)
    seen = first_page.astype(np.int64) * raw.page_size
    runs = [(seen, np.minimum(lens, raw.keep_first)), (np.maximum(seen, closed_end(raw, lens)), lens)]
    need_rows(cache, table, runs)


def check_copied_rows(cache: Cache, src_pages: Any, dst_pages: Any) -> None:
    """A page with a raw row must be copied to one that has one too, and the row be there."""
    rows = cache.planes[RAW_ROWS].numpy()
    count = cache.planes[cache.record.raw[0].name].shape[0]
    src, dst = src_pages.numpy(), dst_pages.numpy()
    for name, pages in (("src_pages", src), ("dst_pages", dst)):
        if (wrong := rows[pages] >= count).any():
            at = int(np.argmax(wrong))
            raise ArgumentError(f"{name}[{at}] = {pages[at]}: {_no_row(rows[pages[at]], count)}")
    if (wrong := (rows[src] >= 0) & (rows[dst] < 0)).any():
        at = int(np.argmax(wrong))
        reason = f"page {src[at]} has a raw row, and page {dst[at]} has none to copy it to"
        raise ArgumentError(f"dst_pages[{at}] = {dst[at]}: {reason}; {HINT}")


def need_rows(cache: Cache, table: Any, runs: list[tuple[Any, Any]]) -> Any:
    """The pages of tokens ``first`` to ``end`` (of each request); refuses one without a raw row.

    Ids outside the pool are passed over: where they matter, they are refused for themselves.
    """
    raw = cache.spec.cache.raw
    assert raw is not None
    ids, rows = table.numpy(), cache.planes[RAW_ROWS].numpy()
    count = cache.planes[cache.record.raw[0].name].shape[0]
    column = np.arange(ids.shape[1]) * raw.page_size
    used = np.zeros(ids.shape, bool)
    for first, end in runs:
        used |= (column + raw.page_size > first[:, None]) & (column < end[:, None]) & (first < end)[:, None]
    used &= (ids >= 0) & (ids < cache.num_pages)
    found = np.zeros(ids.shape, np.int64)
    found[used] = rows[ids[used]]
    wrong = used & ((found < 0) | (found >= count))
    if wrong.any():
        b, p = (int(i) for i in np.argwhere(wrong)[0])
        reason = f"request {b} has unquantised tokens in this page, and {_no_row(found[b, p], count)}"
        raise ArgumentError(f"page_table[{b}, {p}] = {ids[b, p]}: {reason}")
    return ids[used]


def _check_apart(cache: Cache, pages: Any) -> None:
    """Two pages that an append needs the raw rows of must not have the same one."""
    pages = np.unique(pages)
    rows = cache.planes[RAW_ROWS].numpy()[pages]
    order = np.argsort(rows, kind="stable")
    twice = np.flatnonzero(rows[order][1:] == rows[order][:-1])
    if twice.size:
        a, b = order[twice[0]], order[twice[0] + 1]
        reason = f"pages {pages[a]} and {pages[b]} both have raw row {rows[a]}"
        raise ArgumentError(f"raw_rows: {reason}, and one's tokens would overwrite the other's; {HINT}")


def closed_end(raw: RawSpec, lens: Any) -> Any:
    """``RawSpec.closed_end`` of many lengths."""
    return np.maximum(0, lens - raw.keep_last) // raw.block * raw.block


def _no_row(row: int, count: int) -> str:
    if row < 0:
        return f"it has no raw row: {HINT}"
    return f"its raw row is {row}, but there are rows 0 to {count - 1}: give raw_rows such"


def _check_owned(raw: RawSpec, table: Any, runs: list[tuple[Any, Any]]) -> None:
    """Tokens that an append writes or turns into codes (``runs``, of each request) must be one request's."""
    ids = table.numpy()
    first, end = (np.concatenate([run[at] for run in runs]) for at in (0, 1))
    counts = np.maximum(0, end - first)
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    token = np.arange(counts.sum()) + (first - starts)[owner]
    owner %= len(ids)
    slot = ids[owner, token // raw.page_size].astype(np.int64) * raw.page_size + token % raw.page_size
    order = np.argsort(slot, kind="stable")
    twice = np.flatnonzero(slot[order][1:] == slot[order][:-1])
    if twice.size:
        a, b = owner[order[twice[0]]], owner[order[twice[0] + 1]]
        page = slot[order[twice[0]]] // raw.page_size
        raise ArgumentError(
            f"page_table: requests {a} and {b} both write to the same tokens of page {page}, or turn them "
            "into codes; copy the page for one of them first"
        )
