"""codes: numbers already divided by their scale -> codes as unsigned bit fields, and what codes stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.ir import QuantSpec
from kvgen.reference.floats import decoded, encode_float

Array = npt.NDArray[Any]


def numbers_to_codes(scaled: Array, quant: QuantSpec) -> Array:
    """f32 [...] -> codes uint8 [...]: the nearest (ties to even; in a table, to the lower level), saturated.

    Affine ones have had their minimum taken away. NaN becomes what stands for 0, or a float's NaN.
    """
    fmt = quant.fmt
    if fmt.kind == "float":
        return encode_float(scaled, fmt)
    x = np.where(np.isnan(scaled), np.float32(0.0), scaled).astype(np.float32)
    if fmt.kind == "table":
        return np.searchsorted(bounds(fmt.levels), x, side="left").astype(np.uint8)
    if quant.affine:
        return np.clip(np.rint(x), 0, quant.steps).astype(np.uint8)
    assert fmt.qmax is not None
    whole = np.clip(np.rint(x), -fmt.qmax, fmt.qmax).astype(np.int64)
    biased = whole + (1 << (fmt.bits - 1)) if fmt.offset else whole
    return (biased & ((1 << fmt.bits) - 1)).astype(np.uint8)


def bounds(levels: tuple[float, ...]) -> Array:
    """f32 [levels - 1]: the middles of neighbouring levels; a number above one has at least its index."""
    edges = np.asarray(levels, dtype=np.float32)
    return ((edges[1:] + edges[:-1]) * np.float32(0.5)).astype(np.float32)


def zero_code(quant: QuantSpec) -> int:
    """The code of a block of zeros; 0 where codes are affine."""
    return 0 if quant.affine else int(numbers_to_codes(np.zeros(1, np.float32), quant)[0])


def code_values(quant: QuantSpec) -> Array:
    """f64 [2**bits]: what each code stands for, before scale and minimum.

    The codes past the last level of a table stand for the last one.
    """
    fmt = quant.fmt
    codes = np.arange(1 << fmt.bits)
    if fmt.kind == "float":
        return decoded(fmt)
    if fmt.kind == "table":
        levels = np.asarray(fmt.levels, dtype=np.float32).astype(np.float64)
        return levels[np.minimum(codes, len(levels) - 1)]
    if quant.affine:
        return codes.astype(np.float64)
    half = 1 << (fmt.bits - 1)
    return (codes - half if fmt.offset else (codes ^ half) - half).astype(np.float64)
