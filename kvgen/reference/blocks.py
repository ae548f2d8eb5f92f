"""blocks: numbers that share a scale -> codes, scales and minima, and back; transforms before and after.

Everything is decided in f32, the type kernels compute in; only ``dequantise`` widens to f64, because a stored
value is exact there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.ir import QuantSpec
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.reference.codes import code_values, numbers_to_codes, zero_code
from kvgen.reference.floats import INF_BITS
from kvgen.reference.scales import load_scale, store_power, store_scale

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Coded:
    """Rows as they are stored."""

    codes: Array
    """uint8 [T, head, D]."""
    scale: Array | None
    """[T / tokens, head, D / block] in the scale's type; None where scales are given."""
    low: Array | None
    """The minimum beside each scale."""


def quantise(
    x: Array,
    quant: QuantSpec,
    given: Array | None = None,
    outer: Array | None = None,
    kept: Array | None = None,
) -> Coded:
    """f32 [T, head, D] -> codes. T is a multiple of the tokens that share a scale.

    ``given``: the static scale, f32 [] or [head]; ``outer``: a scale above the stored ones, likewise.
    ``kept``, bool [T], marks tokens that count; the others get code bits 0 and no say in the scale.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    if quant.static_scale:
        assert given is not None
        with np.errstate(over="ignore"):
            scaled = x * (np.float32(1.0) / np.asarray(given, np.float32))[..., None]
        return Coded(numbers_to_codes(scaled, quant), None, None)
    tokens, heads, width = x.shape
    span, block = quant.tok_block, quant.d_block or width
    counts = np.ones(tokens, bool) if kept is None else kept
    cells = (tokens // span, span, heads, width // block, block)
    live_cells = np.broadcast_to(counts.reshape(tokens // span, span, 1, 1, 1), cells)
    rows = x.reshape(cells)
    find = _affine if quant.affine else _symmetric
    codes, scale, low = find(rows, live_cells, quant, outer)
    return Coded(np.where(live_cells, codes, 0).astype(np.uint8).reshape(x.shape), scale, low)


def _symmetric(
    rows: Array, counts: Array, quant: QuantSpec, outer: Array | None
) -> tuple[Array, Array, Array | None]:
    axes, fmt = (1, 4), quant.fmt
    bits = np.where(counts, rows.view(np.uint32) & 0x7FFFFFFF, 0).astype(np.uint32)
    amax_bits = bits.max(axis=axes)
    amax, bad = amax_bits.view(np.float32), amax_bits >= INF_BITS
    live = ~bad & (amax >= np.float32(ZERO_BLOCK_AMAX))
    above = np.float32(1.0) if outer is None else np.asarray(outer, np.float32)[..., None]  # [head, 1] or [1]
    if quant.scale_dtype == "e8m0":
        stored = store_power(amax, fmt.qmax or 1.0, bad, live)
    else:
        size = np.where(live, amax, np.float32(1.0)).astype(np.float32)
        if fmt.measure == "rms":
            squares = np.where(counts & live[:, None, ..., None], rows, 0.0).astype(np.float64) ** 2
            number = np.maximum(counts.sum(axis=axes), 1)
            size = np.sqrt(squares.sum(axis=axes) / number).astype(np.float32)
            scale = size
        else:
            scale = (size / np.float32(fmt.qmax)).astype(np.float32)
        with np.errstate(over="ignore"):
            scale = scale if outer is None else (scale / above).astype(np.float32)
        scale = np.where(bad, np.float32(np.nan), np.where(live, scale, np.float32(0.0)))
        stored = store_scale(scale, quant.scale_dtype)
    loaded = load_scale(stored, quant.scale_dtype)
    whole = (np.where(live, loaded, np.float32(1.0)) * above).astype(np.float32)
    live &= whole != 0.0
    take = live[:, None, ..., None]
    with np.errstate(over="ignore", invalid="ignore"):  # under an outer scale the product may be denormal
        inv = (np.float32(1.0) / np.where(whole == 0.0, np.float32(1.0), whole)).astype(np.float32)
        scaled = np.where(take, rows, np.float32(0.0)) * inv[:, None, ..., None]
    codes = np.where(take, numbers_to_codes(scaled, quant), zero_code(quant))
    return codes, stored, None


def _affine(
    rows: Array, counts: Array, quant: QuantSpec, outer: Array | None
) -> tuple[Array, Array, Array | None]:
    axes = (1, 4)
    bits = np.where(counts, rows.view(np.uint32) & 0x7FFFFFFF, 0).astype(np.uint32)
    nan = np.float32(np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        low = np.where(counts, rows, np.float32(np.inf)).min(axis=axes).astype(np.float32) + np.float32(0.0)
        high = np.where(counts, rows, -np.float32(np.inf)).max(axis=axes).astype(np.float32)
        reach = (high - low).astype(np.float32)
        bad = (bits.max(axis=axes) >= INF_BITS) | ~np.isfinite(reach)
    stored_low = store_scale(np.where(bad, nan, low), quant.scale_dtype)
    live = ~bad & (reach >= np.float32(ZERO_BLOCK_AMAX))
    scale = (np.where(live, reach, np.float32(0.0)) / np.float32(quant.steps)).astype(np.float32)
    stored = store_scale(np.where(bad, nan, scale), quant.scale_dtype)
    step, base = load_scale(stored, quant.scale_dtype), load_scale(stored_low, quant.scale_dtype)
    live &= step != 0.0
    inv = (np.float32(1.0) / np.where(live, step, np.float32(1.0))).astype(np.float32)
    take = live[:, None, ..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        above = np.where(take, rows - base[:, None, ..., None], np.float32(0.0)).astype(np.float32)
        scaled = (above * inv[:, None, ..., None]).astype(np.float32)
    return np.where(take, numbers_to_codes(scaled, quant), 0), stored, stored_low


def dequantise(codes: Array, quant: QuantSpec, scale: Array, low: Array | None, outer: Array | None) -> Array:
    """Codes uint8 [..., tok, D] -> f64 [..., tok, D]: what they stand for, in the space of stored rows.

    ``scale`` and ``low`` as they are stored, [..., tok / tokens, D / block]; given scales as f32
    [..., 1, 1]. ``outer`` f32, broadcast likewise.
    """
    numbers = code_values(quant)[codes]
    dtype = "f32" if quant.static_scale else quant.scale_dtype
    with np.errstate(invalid="ignore"):
        found = numbers * _spread(load_scale(scale, dtype).astype(np.float64), numbers.shape)
        if outer is not None:
            found = found * np.asarray(outer, np.float32).astype(np.float64)
        if low is not None:
            found = found + _spread(load_scale(low, dtype).astype(np.float64), numbers.shape)
    return np.asarray(found)


def _spread(values: Array, shape: tuple[int, ...]) -> Array:
    """Each value over its block of the last two axes."""
    for axis in (-2, -1):
        values = np.repeat(values, shape[axis] // values.shape[axis], axis=axis)
    return values


def hadamard(x: Array) -> Array:
    """[..., D] -> [..., D] in the type of x: the orthonormal Walsh-Hadamard transform, its own inverse.

    In f32 each stage adds and subtracts neighbours at distance D/2, D/4, ..., 1, then everything is
    multiplied by D ** -0.5: this order is part of the format, as writers must agree in every bit.
    """
    x, width = np.asarray(x), x.shape[-1]
    kind = x.dtype.type
    step = width // 2
    while step:
        pairs = x.reshape(*x.shape[:-1], width // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step //= 2
    return np.asarray(x * kind(np.float32(width**-0.5)))
