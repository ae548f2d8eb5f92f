"""cache: the ops of a paged cache over its bytes: append, copy, gather, decode, prefill.

Arguments are numpy versions of what the generated ops take. ``scales`` holds the scales that an append
cannot find (static and outer ones), by plane: ``{"k": f32 [] or [head], "v": ...}``; missing ones are an
error, never 1.0. ``means`` holds K's mean, ``{"k": f32 [head, d]}``. Page ids are read only where a request
has tokens; a table's tail is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord, Spec
from kvgen.reference.attend import attend
from kvgen.reference.blocks import hadamard
from kvgen.reference.codec import Array, int8_rows, widen
from kvgen.reference.layout import Pools, view
from kvgen.reference.raw import append_raw, read_raw
from kvgen.reference.rope import rotate
from kvgen.reference.stored import from_stored, mean_of, read_pages, to_stored, write_rows
from kvgen.reference.terms import Terms

Ints = Sequence[int] | Array
Scales = Mapping[str, Array] | None
Params = Mapping[str, Array] | None


def append(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    k_THD: Array,
    v_THD: Array | None,
    slots_T: Ints,
    *,
    scales: Scales = None,
    means: Scales = None,
    positions_T: Ints | None = None,
    params: Params = None,
) -> None:
    """Store tokens in place: k [T, kv_heads, head_dim], v [T, kv_heads, v_head_dim] at slots int64 [T].

    Slot s is token ``s % page_size`` of page ``s // page_size``; -1 is skipped. Inputs are f32, f16, or
    uint16 holding bf16. Where the spec rotates K at append, each row is rotated by its position's row of
    ``params["rope_table"]``; where V is a part of K, ``v_THD`` is None. Writes the bytes of those slots and
    of their scales, no other. Raises ``ArgumentError`` for a slot outside the pool, a slot twice, or a
    missing static scale.
    """
    slots = np.asarray(slots_T, dtype=np.int64)
    att, size = spec.attention, spec.cache.page_size
    live = slots != -1
    if ((slots < -1) | (slots >= num_pages * size)).any():
        raise ArgumentError(f"slots must be -1 or lie in 0 to {num_pages * size - 1}")
    if len(np.unique(slots[live])) != live.sum():
        raise ArgumentError("the same slot twice in one append")
    page, tok = np.divmod(slots[live], size)
    rows = _checked_rows(spec, k_THD, v_THD, len(slots))
    table = param_of(params, "rope_table") if att.rope and att.rope.stored == "post" else None
    if table is not None and positions_T is None:
        raise ArgumentError("positions_T is missing: this spec rotates K at append")
    positions = None if positions_T is None else np.asarray(positions_T)[live]
    for field in spec.cache.fields:
        x = to_stored(spec, field, rows[field][live], means, positions, table)
        for part in spec.segments(field):
            own = x[..., part.start : part.start + part.size]
            write_rows(spec, record, pools, num_pages, part, own, (page, tok), scales)


def append_requests(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    k_THD: Array,
    v_THD: Array | None,
    page_table: Sequence[Ints] | Array,
    kv_lens: Ints,
    q_starts: Ints,
    raw_rows: Array,
    *,
    scales: Scales = None,
    means: Scales = None,
    params: Params = None,
) -> None:
    """``append`` for specs that keep raw rows: tokens of requests, ``kv_lens`` [B] counted after it, rows
    ``q_starts[b]`` to ``q_starts[b + 1]`` being those of request b. See ``kvgen.reference.raw``."""
    rope = spec.attention.rope
    table = param_of(params, "rope_table") if rope and rope.stored == "post" else None
    rows = _checked_rows(spec, k_THD, v_THD, len(k_THD))
    append_raw(
        spec, record, pools, num_pages, rows, page_table, kv_lens, q_starts, raw_rows,
        scales=scales, means=means, rope_table=table,
    )  # fmt: skip


def _checked_rows(spec: Spec, k_THD: Array, v_THD: Array | None, tokens: int) -> dict[str, Array]:
    """New rows by field; ``ArgumentError`` for one of another shape."""
    att = spec.attention
    given = {"k": (k_THD, att.head_dim), "v": (v_THD, att.v_head_dim)}
    found = {}
    for field in spec.cache.fields:
        rows, width = given[field]
        if rows is None or rows.shape != (tokens, att.kv_heads, width):
            shape = None if rows is None else rows.shape
            raise ArgumentError(f"{field} {shape}: expected {(tokens, att.kv_heads, width)}")
        found[field] = rows
    return found


def copy(record: PageRecord, pools: Pools, num_pages: int, sources: Ints, destinations: Ints) -> None:
    """Copy whole pages in place, scales included: page ``sources[i]`` to ``destinations[i]``.

    Raises ``ArgumentError`` for ids outside the pool, a page that is destination twice, or one that is
    source and destination at once.
    """
    src, dst = np.asarray(sources, dtype=np.int64), np.asarray(destinations, dtype=np.int64)
    if src.shape != dst.shape or src.ndim != 1:
        raise ArgumentError(f"sources {src.shape} and destinations {dst.shape}: expected [N] and [N]")
    both = np.concatenate([src, dst])
    if ((both < 0) | (both >= num_pages)).any():
        raise ArgumentError(f"page ids must lie in 0 to {num_pages - 1}")
    if len(np.unique(dst)) != len(dst) or np.isin(src, dst).any():
        raise ArgumentError("a page is destination twice, or source and destination at once")
    for plane in record.planes:
        whole = view(pools, record, plane.name, num_pages)
        whole[dst] = whole[src]


def gather(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    page_table: Sequence[Ints] | Array,
    kv_lens: Ints,
    *,
    scales: Scales = None,
    means: Scales = None,
    raw_rows: Array | None = None,
) -> tuple[list[Array], list[Array]]:
    """The stored values of each request: lists of k f64 [len, kv_heads, d] and v f64 [len, kv_heads, v_d].

    ``page_table[b]`` lists page ids; entries past ceil(len / page_size) are not read. Raises
    ``ArgumentError`` for an id outside the pool or a row too short for its length.
    """
    size = spec.cache.page_size
    found: dict[str, list[Array]] = {"k": [], "v": []}
    for b, length in enumerate(int(n) for n in kv_lens):
        need = -(-length // size)
        pages = np.array([int(p) for p in page_table[b][:need]], dtype=np.int64)
        if length < 0 or len(pages) < need:
            raise ArgumentError(
                f"request {b}: length {length} needs {need} pages, the table lists {len(pages)}"
            )
        if ((pages < 0) | (pages >= num_pages)).any():
            raise ArgumentError(f"request {b}: page ids {pages.tolist()} must lie in 0 to {num_pages - 1}")
        for field in spec.cache.fields:
            rows = found[field]
            values = read_pages(spec, record, pools, num_pages, field, pages, scales)  # [page, head, tok, d]
            heads, width = values.shape[1], values.shape[3]
            stored = values.transpose(0, 2, 1, 3).reshape(need * size, heads, width)[:length]
            if spec.cache.raw is not None:
                if raw_rows is None:
                    raise ArgumentError("raw_rows is missing: this spec leaves some tokens unquantised")
                for token, row in read_raw(spec, record, pools, field, pages, length, raw_rows).items():
                    stored[token] = row
            rows.append(from_stored(spec, field, stored.transpose(1, 0, 2), means).transpose(1, 0, 2))
    if spec.cache.alias:
        return found["k"], [rows[..., : spec.attention.v_head_dim] for rows in found["k"]]
    return found["k"], found["v"]


def keys_to_attend(spec: Spec, keys: list[Array], params: Params) -> list[Array]:
    """What queries meet: the stored keys, rotated to their positions where the spec stores them unrotated."""
    rope = spec.attention.rope
    if rope is None or rope.stored != "pre":
        return keys
    table = param_of(params, "rope_table")
    return [rotate(k, table[: len(k)], rope) for k in keys]


def scored(
    spec: Spec, q_THD: Array, keys: list[Array], params: Params, means: Scales
) -> tuple[Array, list[Array]]:
    """Queries and gathered keys -> the two whose products are the scores, with the roundings of the spec.

    With ``qk = "int8"`` a query meets the stored keys as its int8 codes say, made where K is stored rotated
    from the rotated query; it meets the mean of K as it is. Both products stand side by side in the rows
    returned then, [..., 2 * head_dim].
    """
    keys = keys_to_attend(spec, keys, params)
    if spec.attention.qk != "int8":
        return q_THD, keys
    quant, q = spec.cache.k, widen(q_THD)
    rounded = hadamard(int8_rows(hadamard(q.astype(np.float32)))) if quant.transform else int8_rows(q)
    if not quant.mean:
        return rounded, keys
    mean = mean_of(spec, means).astype(np.float64)
    beside = [np.concatenate([k - mean, np.broadcast_to(mean, k.shape)], axis=-1) for k in keys]
    return np.concatenate([rounded, q], axis=-1), beside


def prefill(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    page_table: Sequence[Ints] | Array,
    kv_lens: Ints,
    q_THD: Array,
    q_starts: Ints,
    *,
    scales: Scales = None,
    means: Scales = None,
    raw_rows: Array | None = None,
    kv_first: Ints | None = None,
    scale: float | None = None,
    params: Params = None,
    finalize: bool = True,
) -> tuple[Array, Array]:
    """Attention of ragged queries over a paged cache: f64 out and lse.

    ``q_THD`` [total_q, q_heads, d] -> out [total_q, q_heads, v_d] and lse [total_q, q_heads], base 2.
    ``kv_lens`` int32 [B] counts the tokens after this step's append; ``q_starts`` int32 [B + 1];
    ``kv_first`` int32 [B] drops earlier keys; ``scale`` overrides the spec's; ``params`` are the spec's
    parameters by name (bits packed); without ``finalize`` a sink is left out. ``qk = "int8"`` is modelled
    (``scored``); ``pv = "int8"`` is not modelled but bounded: see ``weights_bound``.
    """
    att = spec.attention
    if q_THD.shape[1:] != (att.q_heads, att.head_dim):
        raise ArgumentError(f"q {q_THD.shape}: expected [total_q, {att.q_heads}, {att.head_dim}]")
    if len(kv_lens) == 0 and len(q_THD) == 0:
        return np.zeros((0, att.q_heads, att.v_head_dim)), np.zeros((0, att.q_heads))
    keys, values = gather(
        spec, record, pools, num_pages, page_table, kv_lens, scales=scales, means=means, raw_rows=raw_rows
    )
    factor = att.scale if scale is None else scale
    asked, keys = scored(spec, q_THD, keys, params, means)
    return attend(
        asked,
        keys,
        values,
        q_starts=q_starts,
        scale=factor,
        kv_first=kv_first,
        terms=Terms(att, params),
        finalize=finalize,
    )


def decode(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    page_table: Sequence[Ints] | Array,
    kv_lens: Ints,
    q_THD: Array,
    q_starts: Ints | None = None,
    *,
    scales: Scales = None,
    means: Scales = None,
    raw_rows: Array | None = None,
    kv_first: Ints | None = None,
    scale: float | None = None,
    params: Params = None,
    finalize: bool = True,
) -> tuple[Array, Array]:
    """``prefill`` with one query a request where ``q_starts`` is None: q [B, q_heads, head_dim]."""
    starts = np.arange(len(kv_lens) + 1) if q_starts is None else q_starts
    return prefill(
        spec,
        record,
        pools,
        num_pages,
        page_table,
        kv_lens,
        q_THD,
        starts,
        scales=scales,
        means=means,
        raw_rows=raw_rows,
        kv_first=kv_first,
        scale=scale,
        params=params,
        finalize=finalize,
    )


def param_of(params: Params, name: str) -> Array:
    """The parameter called ``name``; ``ArgumentError`` where it was not given."""
    if params is None or name not in params:
        raise ArgumentError(f"params[{name!r}] is missing: this spec reads it")
    return params[name]
