"""codec: numbers to stored codes and back, bit for bit what a kernel must do.

Everything is decided in f32, the type kernels compute in; only ``decode_values`` widens to f64,
because a stored value is exact there. What each format stores for the odd values:

====================  ==========================  ====================  ============================
value                 f32, bf16, f16              int8, token and head  int8, static scale
====================  ==========================  ====================  ============================
NaN                   a NaN (payload unspecified)  scale NaN, codes 0    code 0
+inf, -inf            itself                      scale NaN, codes 0    127, -127 (saturated)
too large for type    inf (IEEE round to nearest)  cannot happen         127, -127 (saturated)
denormal f32          rounded, never flushed      as any other value    as any other value
row amax < 2**-100    as it is                    scale 0, codes 0      as any other value
====================  ==========================  ====================  ============================

So a NaN or inf in one (token, head) row makes that row read back as NaN under token-head int8 and
reaches no other row. A kernel finds it for free: the maximum over ``bits & 0x7fffffff`` taken as
integers orders finite < inf < NaN, so the amax it needs anyway is >= 0x7f800000 exactly then.
The stored NaN scale is the canonical 0x7fc00000, so writers agree in every byte.

The bf16 rounding is the usual bit trick (add 0x7fff plus the lowest kept bit, then cut). Note that
``vcvtneps2bf16`` flushes denormals: a kernel that wants these bits rounds in integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.errors import ArgumentError
from kvgen.ir.quant import FORMATS, ZERO_BLOCK_AMAX

Array = npt.NDArray[Any]

NUMPY: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "bf16": np.dtype("<u2"),
    "f16": np.dtype("<f2"),
    "int8": np.dtype("i1"),
}
"""The numpy type that holds a storage type; bf16 as its 16 bits."""

_INF_BITS = np.uint32(0x7F800000)


def f32_to_bf16(x: Array) -> Array:
    """f32 [...] -> bf16 bits uint16 [...], round to nearest even; overflow becomes inf; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).reshape(np.shape(x))
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding a NaN could carry into the exponent or leave an infinity: cut it and set the quiet bit.
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > _INF_BITS, quiet, rounded)


def bf16_to_f32(bits: Array) -> Array:
    """bf16 bits uint16 [...] -> f32 [...], exact."""
    wide = np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(np.shape(bits))


def widen(x: Array) -> Array:
    """A float input as f64 [...], exact: float64, float32, float16, or uint16 read as bf16.

    Raises ``ArgumentError`` for any other type: nothing is reinterpreted silently.
    """
    x = np.asarray(x)
    if x.dtype == np.uint16:
        return bf16_to_f32(x).astype(np.float64)
    if x.dtype in (np.float16, np.float32, np.float64):
        return x.astype(np.float64)
    raise ArgumentError(f"dtype {x.dtype}: expected float64, float32, float16, or uint16 holding bf16 bits")


def store_float(x: Array, dtype: str) -> Array:
    """f32 [...] -> what a plain format stores [...]: f32, or bf16 bits or f16 rounded to nearest even."""
    x = np.asarray(x, dtype=np.float32)
    if dtype == "bf16":
        return f32_to_bf16(x)
    with np.errstate(over="ignore"):  # an overflow to inf is the rule, not a mistake
        return x.astype(NUMPY[dtype])


def encode_rows(x: Array, qmax: int) -> tuple[Array, Array]:
    """f32 [..., d] -> codes int8 [..., d] and scales f32 [...]: one scale a row (a token of a head).

    scale = amax / qmax, code = round-to-nearest-even(x * (1 / scale)), all in f32, saturated to +-qmax.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    amax_bits = (x.view(np.uint32) & 0x7FFFFFFF).max(axis=-1)
    amax = amax_bits.view(np.float32)
    bad = amax_bits >= _INF_BITS
    live = ~bad & (amax >= np.float32(ZERO_BLOCK_AMAX))
    safe = np.where(live, amax, np.float32(1.0)).astype(np.float32)
    scale = safe / np.float32(qmax)
    inv = np.float32(1.0) / scale
    codes = _round(np.where(live[..., None], x, np.float32(0.0)) * inv[..., None], qmax)
    stored = np.where(bad, np.float32(np.nan), np.where(live, scale, np.float32(0.0)))
    return codes, stored.astype(np.float32)


def encode_static(x: Array, scale: Array, qmax: int) -> Array:
    """f32 [..., head, d] -> codes int8 [..., head, d] under given scales, f32 [] or [head].

    NaN stores 0, inf and everything too large saturate. Raises ``ArgumentError`` for a scale that is not
    finite or below 2**-100 (1 / scale would not be a number to round with).
    """
    scale = np.asarray(scale, dtype=np.float32)
    if not (np.isfinite(scale) & (scale >= np.float32(ZERO_BLOCK_AMAX))).all():
        raise ArgumentError("a static scale must be finite and at least 2**-100")
    inv = (np.float32(1.0) / scale)[..., None]
    with np.errstate(over="ignore"):
        scaled = np.asarray(x, dtype=np.float32) * inv
    return _round(np.where(np.isnan(scaled), np.float32(0.0), scaled), qmax)


def decode_values(codes: Array, fmt: str, scale: Array | None = None) -> Array:
    """Stored codes [..., d] -> the values they stand for, f64 [..., d].

    ``scale`` broadcasts against ``codes`` without its last axis; None for a plain format.
    """
    if not FORMATS[fmt].scaled:
        return widen(codes)
    if scale is None:
        raise ArgumentError(f"{fmt} codes mean nothing without their scales")
    return codes.astype(np.float64) * np.asarray(scale, dtype=np.float32).astype(np.float64)[..., None]


def _round(x: Array, qmax: int) -> Array:
    return np.clip(np.rint(x), -qmax, qmax).astype(np.int8)
