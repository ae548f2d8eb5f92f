"""codec: numbers to stored codes and back, bit for bit what a kernel must do.

Everything is decided in f32, the type kernels compute in; only ``decode_values`` widens to f64,
because a stored value is exact there. What each format stores for the odd values:

====================  ==========================  ====================  ============================
value                 f32, bf16, f16              token in the group    static scale
====================  ==========================  ====================  ============================
NaN                   a NaN (payload unspecified)  scale NaN, codes 0    code 0; e4m3: its NaN, 0x7f
+inf, -inf            itself                      scale NaN, codes 0    +-qmax (saturated)
too large for type    inf (IEEE round to nearest)  cannot happen         +-qmax (saturated)
denormal f32          rounded, never flushed      as any other value    as any other value
row amax < 2**-100    as it is                    scale 0, codes 0      as any other value
====================  ==========================  ====================  ============================

Scaled codes are int8, int4 (two's complement nibbles, packed as halves: byte j holds code j in its low half
and code j + D/2 in its high one) and e4m3 (OCP e4m3fn). A "row" is what shares a scale: a (token, head), or
a block of d of it. So a NaN or inf in one row makes that row read back as NaN and reaches no other row. A
kernel finds it for free: the maximum over ``bits & 0x7fffffff`` taken as integers orders finite < inf < NaN,
so the amax it needs anyway is >= 0x7f800000 exactly then.
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
    "int4x2": np.dtype("u1"),
    "e4m3": np.dtype("u1"),
}
"""The numpy type that holds a storage type; bf16 and e4m3 as their bits."""

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


def encode_rows(x: Array, fmt: str, block: int | None = None) -> tuple[Array, Array]:
    """f32 [..., d] -> stored codes [..., d] ([..., d/2] where packed) and scales f32.

    One scale a row, f32 [...]; with ``block``, one for so many elements of d, f32 [..., d // block].
    scale = amax / qmax, code = round-to-nearest-even(x * (1 / scale)), all in f32, saturated to +-qmax.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    rows = x if block is None else x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    amax_bits = (rows.view(np.uint32) & 0x7FFFFFFF).max(axis=-1)
    amax = amax_bits.view(np.float32)
    bad = amax_bits >= _INF_BITS
    live = ~bad & (amax >= np.float32(ZERO_BLOCK_AMAX))
    safe = np.where(live, amax, np.float32(1.0)).astype(np.float32)
    scale = safe / np.float32(FORMATS[fmt].qmax)
    inv = np.float32(1.0) / scale
    scaled = np.where(live[..., None], rows, np.float32(0.0)) * inv[..., None]
    stored = np.where(bad, np.float32(np.nan), np.where(live, scale, np.float32(0.0)))
    return to_codes(scaled.reshape(x.shape), fmt), stored.astype(np.float32)


def encode_static(x: Array, scale: Array, fmt: str) -> Array:
    """f32 [..., head, d] -> stored codes [..., head, d] (or d/2) under given scales, f32 [] or [head].

    Inf and everything too large saturate; the table above says what NaN stores. Raises ``ArgumentError``
    for a scale that is not finite or below 2**-100 (1 / scale would not be a number to round with).
    """
    scale = np.asarray(scale, dtype=np.float32)
    if not (np.isfinite(scale) & (scale >= np.float32(ZERO_BLOCK_AMAX))).all():
        raise ArgumentError("a static scale must be finite and at least 2**-100")
    inv = (np.float32(1.0) / scale)[..., None]
    with np.errstate(over="ignore"):
        scaled = np.asarray(x, dtype=np.float32) * inv
    return to_codes(scaled, fmt)


def int8_rows(x: Array) -> Array:
    """Rows [..., d] in any type ``widen`` takes -> f64 [..., d]: what one int8 code per element and a scale
    per row stand for (``qk = "int8"``). A row with NaN or inf is NaN, one of zeros is zero."""
    codes, scale = encode_rows(widen(x).astype(np.float32), "int8")
    return decode_values(codes, "int8", scale)


def to_codes(scaled: Array, fmt: str) -> Array:
    """f32 [..., d], already divided by the scale -> stored codes: rounded to nearest even and saturated."""
    kind = FORMATS[fmt]
    if not kind.integer:
        return f32_to_e4m3(scaled)
    assert kind.qmax is not None
    whole = np.clip(np.rint(np.where(np.isnan(scaled), np.float32(0.0), scaled)), -kind.qmax, kind.qmax)
    codes = whole.astype(np.int8)
    return codes if kind.packed == 1 else pack_nibbles(codes)


def decode_values(codes: Array, fmt: str, scale: Array | None = None, block: int | None = None) -> Array:
    """Stored codes [..., d] (or d/2) -> the values they stand for, f64 [..., d].

    ``scale`` broadcasts against the codes without their last axis; with ``block`` its own last axis counts
    blocks of d. None for a plain format.
    """
    kind = FORMATS[fmt]
    if not kind.scaled:
        return widen(codes)
    if scale is None:
        raise ArgumentError(f"{fmt} codes mean nothing without their scales")
    if kind.packed > 1:
        codes = unpack_nibbles(codes)
    values = codes.astype(np.float64) if kind.integer else e4m3_to_f64(codes)
    wide: Array = np.asarray(scale, dtype=np.float32).astype(np.float64)
    return values * (wide[..., None] if block is None else np.repeat(wide, block, axis=-1))


def pack_nibbles(codes: Array) -> Array:
    """Codes int8 [..., d] of -8..7 -> bytes uint8 [..., d/2]: the first half of a row in the low nibbles."""
    low, high = np.split(codes.astype(np.uint8) & 15, 2, axis=-1)
    return np.asarray(low | high << 4)


def unpack_nibbles(stored: Array) -> Array:
    """The inverse of ``pack_nibbles``: uint8 [..., d/2] -> int8 [..., d]."""
    biased = np.concatenate([stored & 15, stored >> 4], axis=-1) ^ 8
    return biased.astype(np.int8) - np.int8(8)


def e4m3_to_f64(bits: Array) -> Array:
    """OCP e4m3fn bits uint8 [...] -> f64 [...], exact; 0x7f and 0xff are NaN."""
    return np.asarray(_E4M3[np.asarray(bits, dtype=np.uint8)])


def f32_to_e4m3(x: Array) -> Array:
    """f32 [...] -> e4m3fn bits uint8 [...], round to nearest even, saturated to +-448; NaN becomes 0x7f."""
    wide = np.asarray(x, dtype=np.float32).astype(np.float64)
    size = np.minimum(np.abs(np.where(np.isnan(wide), 0.0, wide)), 448.0)
    # A step is 2^-3 of the value's power of two, and 2^-9 below 2^-6.
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)
    step = np.exp2(exponent - 3.0)
    rounded = np.rint(size / step) * step
    bits = np.searchsorted(_E4M3[:127], rounded).astype(np.uint8)
    signed = bits | np.where(np.signbit(wide), np.uint8(0x80), np.uint8(0))
    return np.where(np.isnan(wide), np.uint8(0x7F), signed)


def _e4m3_table() -> Array:
    """The 256 values of e4m3fn: four bits of exponent (bias 7), three of mantissa, no infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, (bits & 7) / 8.0
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1.0 + mantissa) * np.exp2(exponent - 7.0))
    values = np.where(bits & 0x80, -size, size)
    values[[0x7F, 0xFF]] = np.nan
    return values


_E4M3 = _e4m3_table()
