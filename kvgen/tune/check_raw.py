"""check_raw: appends by requests, whose older tokens become codes later than they come.

Requests of every length around what stays raw, around blocks and pages, get few tokens or many. All bytes of
the pages and of the raw rows are compared with the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvgen import reference
from kvgen.ir import RawSpec
from kvgen.library import Library
from kvgen.reference.codec import Array
from kvgen.tune import scene as scenes
from kvgen.tune.call_params import angles, as_tensors
from kvgen.tune.given import given_means, given_scales
from kvgen.tune.raw_rows import raw_pool, raw_rows_of

Rows = Callable[[np.random.Generator, tuple[int, int, int], str], Array]
Step = tuple[str, Any, dict[str, Array], int]
"""The case's name, the cache after the library's append, the oracle's buffers, pages."""


def steps(raw: RawSpec, *, few: bool) -> list[list[tuple[int, int]]]:
    """Appends, each as the lengths of its requests before and after. ``few``: what an interpreter bears."""
    first, last, block, page = raw.keep_first, raw.keep_last, raw.block, raw.page_size
    edge = last + block
    decode = [(0, 1), (first, first + 1), (edge - 1, edge), (edge, edge + 1), (edge + page - 1, edge + page)]
    chunks = [(0, edge + page + 3), (edge + 1, edge + 2 * page + 1), (3, 3), (0, 0)]
    chunks.append((min(first, edge) + 1, edge + 1))
    if few:
        return [decode[2:4], chunks[:1], chunks[1:3]]
    return [decode, chunks, [(0, max(3 * page, 160) + first)]]


def append(library: Library, variant: str, seed: int, rows_of: Rows, fill: int) -> Iterator[Step]:
    """Every step of ``steps``. ``rows_of`` draws rows, ``fill`` is the byte of what has not been written."""
    spec, record, rng = library.spec, library.record, np.random.default_rng(seed)
    raw = spec.cache.raw
    assert raw is not None
    scales, means = given_scales(spec), given_means(spec)
    for pairs in steps(raw, few=library.target.interpreted):
        news = [new for _, new in pairs]
        pages = _pages(rng, news, raw.page_size)
        count = sum(map(len, pages)) + 3
        lengths = [n for pair in pairs for n in pair]
        raw_rows, held = raw_rows_of(raw, [ids for ids in pages for _ in range(2)], lengths, count, seed)
        assert raw_rows is not None
        pools = reference.new_pools(record, count, fill) | raw_pool(record, held, fill)
        known = scenes.known(scales, means, raw_rows)
        turns = spec.attention.rope is not None and spec.attention.rope.stored == "post"
        params = {"rope_table": angles(spec, max(news) + 1)} if turns else {}
        for old, new in ((0, 0), (0, 1)):
            # What is there before, by the oracle; then the step itself, by both.
            starts = [0, *np.cumsum([pair[new] - (pair[old] if new else 0) for pair in pairs])]
            k, v = _new_rows(library, rng, int(starts[-1]), variant, rows_of)
            lens = [pair[new] for pair in pairs]
            if new:
                cache = scenes.cache_from(library, pools, count, scales, means, raw_rows)
                tables = {"page_table": pages, "kv_lens": lens, "q_starts": starts}
                _launch(library, cache, k, v, tables, params, variant)
            given = known | ({"params": params} if turns else {})
            reference.append_requests(spec, record, pools, count, k, v, pages, lens, starts, **given)
        yield f"append of {pairs} {variant} tokens", cache, pools, count


def _pages(rng: np.random.Generator, lens: Sequence[int], size: int) -> list[list[int]]:
    counts = [-(-n // size) for n in lens]
    ids = iter(rng.permutation(sum(counts) + 3).tolist())
    return [[next(ids) for _ in range(n)] for n in counts]


def _new_rows(
    library: Library, rng: np.random.Generator, tokens: int, variant: str, rows_of: Rows
) -> tuple[Array, Array | None]:
    att = library.spec.attention
    k = rows_of(rng, (tokens, att.kv_heads, att.head_dim), variant)
    if library.spec.cache.alias:
        return k, None
    return k, rows_of(rng, (tokens, att.kv_heads, att.v_head_dim), variant)


def _launch(
    library: Library,
    cache: Any,
    k: Array,
    v: Array | None,
    tables: dict[str, Any],
    params: dict[str, Array],
    variant: str,
) -> None:
    device = cache.device
    pages, nonsense = tables["page_table"], np.array(scenes.HUGE_IDS, np.int64).astype(np.int32)
    table = np.resize(nonsense, (len(pages), max(map(len, pages)) + 2))
    for row, ids in zip(table, pages, strict=True):
        row[: len(ids)] = ids
    ints = {name: np.array(tables[name], np.int32) for name in ("kv_lens", "q_starts")}
    ints["page_table"] = table
    library.append(
        cache,
        scenes.padded(k, variant, device),
        None if v is None else scenes.padded(v, variant, device),
        **{name: scenes.to_torch(array, "i32", device) for name, array in ints.items()},
        params=as_tensors(params, device),
    )
