"""floats: bf16 and the small floats of 4 and 8 bits, bit by bit.

The bf16 rounding is the usual bit trick (add 0x7fff plus the lowest kept bit, then cut). Note that
``vcvtneps2bf16`` flushes denormals: a kernel that wants these bits rounds in integers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.ir.codec import CODECS, Codec, float_value

Array = npt.NDArray[Any]

INF_BITS = np.uint32(0x7F800000)
"""Of f32; greater magnitudes are NaN."""


def f32_to_bf16(x: Array) -> Array:
    """f32 [...] -> bf16 bits uint16 [...], round to nearest even; overflow becomes inf; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).reshape(np.shape(x))
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding a NaN could carry into the exponent or leave an infinity: cut it and set the quiet bit.
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > INF_BITS, quiet, rounded)


def bf16_to_f32(bits: Array) -> Array:
    """bf16 bits uint16 [...] -> f32 [...], exact."""
    wide = np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(np.shape(bits))


def encode_float(x: Array, codec: Codec) -> Array:
    """f32 [...] -> codes uint8 [...] of a small float: nearest, ties to even, saturated at its largest.

    NaN becomes the codec's code for it, or zero where it has none.
    """
    wide = np.asarray(x, dtype=np.float32).astype(np.float64)
    size = np.minimum(np.abs(np.where(np.isnan(wide), 0.0, wide)), codec.qmax or 0.0)
    # A step is 2^-mantissa of the value's power of two, and that of the smallest normal number below it.
    exponent = np.maximum(np.frexp(size)[1] - 1, 1 - codec.bias)
    step = np.exp2(exponent - float(codec.mantissa))
    rounded = np.rint(size / step) * step
    numbers = decoded(codec)[: 1 << (codec.bits - 1)]
    code = np.searchsorted(numbers[np.isfinite(numbers)], rounded).astype(np.uint8)
    signed = code | np.where(np.signbit(wide), np.uint8(1 << (codec.bits - 1)), np.uint8(0))
    return np.where(np.isnan(wide), np.uint8(codec.nan_code or 0), signed).astype(np.uint8)


def decoded(codec: Codec) -> Array:
    """f64 [2**bits]: what each code of a small float stands for."""
    return _decoded(codec)


@lru_cache(maxsize=64)
def _decoded(codec: Codec) -> Array:
    return np.array([float_value(codec, code) for code in range(1 << codec.bits)])


def e4m3_to_f64(bits: Array) -> Array:
    """OCP e4m3fn bits uint8 [...] -> f64 [...], exact; 0x7f and 0xff are NaN."""
    return np.asarray(decoded(CODECS["e4m3"])[np.asarray(bits, dtype=np.uint8)])


def f32_to_e4m3(x: Array) -> Array:
    """f32 [...] -> e4m3fn bits uint8 [...], round to nearest even, saturated to +-448; NaN becomes 0x7f."""
    return encode_float(x, CODECS["e4m3"])
