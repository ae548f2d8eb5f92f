"""raw_rows: which pages of a made-up cache hold unquantised tokens, and where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgen.ir import PageRecord, RawSpec
from kvgen.reference.codec import Array

SPARE = 2
"""Raw rows that no page has: poison that must stay as it is."""


def raw_rows_of(
    raw: RawSpec | None, pages: Sequence[Sequence[int]], lens: Sequence[int], num_pages: int, seed: int = 0
) -> tuple[Array | None, int]:
    """The raw row of each page, i32 [num_pages] with -1 for none, permuted; and how many rows there are.

    ``pages[b]``: page ids of request b, of ``lens[b]`` tokens. None and 0 where every token becomes codes at
    once.
    """
    if raw is None:
        return None, 0
    held = {ids[i] for ids, n in zip(pages, lens, strict=True) for i in raw.pages(n) if i < len(ids)}
    count = min(num_pages, len(held) + SPARE)
    rows = np.full(num_pages, -1, np.int32)
    order = np.random.default_rng(seed).permutation(count)[: len(held)]
    rows[sorted(held)] = order
    return rows, count


def raw_pool(record: PageRecord, count: int, fill: int = 0xFF) -> dict[str, Array]:
    """``{"raw": uint8 [bytes]}`` for so many raw rows of ``fill``; nothing where the cache has none."""
    if not record.raw:
        return {}
    return {"raw": np.full(count * record.raw_bytes(), fill, np.uint8)}


def shareable(raw: RawSpec | None, length: int, pages: int, page_size: int) -> int:
    """How many of a request's first ``pages`` pages another one may have too: those whose tokens are codes
    for both, for an append behind them writes into the others."""
    return pages if raw is None else min(pages, raw.closed_end(length) // page_size)
