"""stored: rows of K and V as an append writes them, and what pages hold, segment by segment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord, Segment, Spec
from kvgen.reference.blocks import dequantise, hadamard, quantise
from kvgen.reference.codec import NUMPY, check_scale, store_float, stored_planes, widen
from kvgen.reference.floats import bf16_to_f32
from kvgen.reference.layout import Pools, join, view
from kvgen.reference.packing import unpack_codes
from kvgen.reference.rope import rotate

Array = npt.NDArray[Any]
Given = Mapping[str, Array] | None
"""Numbers that a caller gives, by the plane (``k``, ``k1``, ``v``) that they belong to."""


def to_stored(
    spec: Spec, field: str, rows: Array, means: Given, positions: Array | None, table: Array | None
) -> Array:
    """New rows [T, head, D] in any type ``widen`` takes -> f32 in the space in which they are stored.

    K is rotated to its position, less its mean, then transformed; rounded to the query's type where rows are
    kept raw.
    """
    att, quant = spec.attention, spec.cache.quant(field)
    x = widen(rows).astype(np.float32)
    if field == "k" and att.rope and att.rope.stored == "post":
        assert positions is not None and table is not None
        x = rotate(x, table[positions], att.rope)
    if quant.mean:
        with np.errstate(invalid="ignore", over="ignore"):
            x = (x - mean_of(spec, means)).astype(np.float32)
    if quant.transform:
        with np.errstate(invalid="ignore", over="ignore"):
            x = hadamard(x)
    return x if spec.cache.raw is None else raw_numbers(store_float(x, att.q_dtype), att.q_dtype)


def raw_numbers(stored: Array, dtype: str) -> Array:
    """Raw rows as they are stored -> f32."""
    return bf16_to_f32(stored) if dtype == "bf16" else np.asarray(stored).astype(np.float32)


def from_stored(spec: Spec, field: str, x: Array, means: Given) -> Array:
    """f64 [..., head, tok, D] in the space of stored rows -> the rows that came, but for rounding."""
    quant = spec.cache.quant(field)
    if quant.transform:
        with np.errstate(invalid="ignore"):
            x = hadamard(x)
    return x + mean_of(spec, means)[:, None, :].astype(np.float64) if quant.mean else x


def write_rows(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    part: Segment,
    x: Array,
    places: tuple[Array, Array],
    scales: Given,
    kept: Array | None = None,
) -> None:
    """Store f32 [T, head, size] at ``places``, (page [T], token in it [T]), as codes and scales.

    T is whole blocks of tokens that share a scale, in order; ``kept`` as in ``quantise``.
    """
    quant, (page, tok) = part.quant, places
    if not quant.fmt.scaled:
        _scatter(view(pools, record, part.plane, num_pages), page, tok, store_float(x, quant.fmt.storage))
        return
    given, outer = given_scales(spec, part, scales)
    coded = quantise(x, quant, given, outer, kept)
    for (name, _), stored in zip(part.codes, stored_planes(coded.codes, quant), strict=True):
        _scatter(view(pools, record, name, num_pages), page, tok, stored)
    span = max(1, quant.tok_block)
    for name, found in ((f"{part.plane}_scale", coded.scale), (f"{part.plane}_min", coded.low)):
        if found is not None:
            target = view(pools, record, name, num_pages)
            if span > 1:
                target[page[::span], :, tok[::span] // span, 0] = found.reshape(
                    len(found), -1, *target.shape[4:]
                )
            else:
                _scatter(target, page, tok, found)


def read_pages(
    spec: Spec, record: PageRecord, pools: Pools, num_pages: int, field: str, pages: Array, scales: Given
) -> Array:
    """f64 [page, head, tok, D]: what the codes of some pages of K or V stand for, as they are stored."""
    parts = [_read_part(spec, record, pools, num_pages, part, pages, scales) for part in spec.segments(field)]
    return np.concatenate(parts, axis=-1)


def _read_part(
    spec: Spec, record: PageRecord, pools: Pools, num_pages: int, part: Segment, pages: Array, scales: Given
) -> Array:
    quant = part.quant
    stored = [join(view(pools, record, name, num_pages)[pages]) for name, _ in part.codes]
    if not quant.fmt.scaled:
        return widen(stored[0])
    planes = [codes.view(np.uint8) for codes in stored]
    codes = unpack_codes(planes, quant.planes) if quant.planes[0].packed > 1 else planes[0]
    given, outer = given_scales(spec, part, scales)
    low = None
    if given is not None:
        scale = np.broadcast_to(given, (codes.shape[1],))[:, None, None]
        scale = np.broadcast_to(scale, (*codes.shape[:2], 1, 1))
    else:
        scale = join(view(pools, record, f"{part.plane}_scale", num_pages)[pages])
        if quant.affine:
            low = join(view(pools, record, f"{part.plane}_min", num_pages)[pages])
    above = None if outer is None else np.broadcast_to(outer, (codes.shape[1],))[:, None, None]
    return dequantise(codes, quant, scale, low, above)


def given_scales(spec: Spec, part: Segment, scales: Given) -> tuple[Array | None, Array | None]:
    """The static scale and the outer scale of a segment, f32 [] or [head]; None for what it has not."""
    quant = part.quant
    dims = quant.scale_dims if quant.static_scale else quant.outer
    if dims is None:
        return None, None
    if scales is None or part.plane not in scales:
        reason = "has no token in its group" if quant.static_scale else "is in units of an outer scale"
        raise ArgumentError(f"scales[{part.plane!r}] is missing: {quant.format} {reason}")
    scale = np.asarray(scales[part.plane], dtype=NUMPY["f32"])
    want = (spec.attention.kv_heads,) if "head" in dims else ()
    if scale.shape != want:
        raise ArgumentError(f"scales[{part.plane!r}] {scale.shape}: expected {want}")
    scale = check_scale(scale)
    return (scale, None) if quant.static_scale else (None, scale)


def mean_of(spec: Spec, means: Given) -> Array:
    """The mean of K, f32 [head, D]; ``ArgumentError`` where it was not given."""
    want = (spec.attention.kv_heads, spec.attention.head_dim)
    if means is None or "k" not in means:
        raise ArgumentError("means['k'] is missing: this spec subtracts a mean from K")
    mean = np.asarray(means["k"], dtype=np.float32)
    if mean.shape != want:
        raise ArgumentError(f"means['k'] {mean.shape}: expected {want}")
    return mean


def _scatter(target: Array, page: Array, tok: Array, rows: Array) -> None:
    """Write rows [T, head, d] into a view [page, head, tok_o, tok_i, d_o, d_i]."""
    _, heads, _, ti, do, di = target.shape
    target[page, :, tok // ti, tok % ti] = rows.reshape(len(page), heads, do, di)
