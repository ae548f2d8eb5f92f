"""codec: numbers to stored codes and back, bit for bit what a kernel must do.

Everything is decided in f32, the type kernels compute in; only ``decode_values`` widens to f64, because a
stored value is exact there. A "block" is what shares a scale: a row (token, head), a run of d of it, or these
over several tokens. What each codec stores for the odd values:

=======================  ====================  ============================  ==========================
value                    f32, bf16, f16        a scale for each block        static scale
=======================  ====================  ============================  ==========================
NaN                      a NaN (any payload)   scale (and min) NaN, codes 0  integers and tables: the
                                                                             code of 0; e4m3, e5m2: 0x7f;
                                                                             floats without NaN: 0
+inf, -inf               itself                scale (and min) NaN, codes 0  largest code (saturated)
too large for the type   inf (to nearest)      cannot happen; affine: a      largest code (saturated)
                                               range that f32 has not counts
                                               as inf
denormal f32             rounded, not flushed  as any other value            as any other value
-0.0                     itself                integers and tables as 0;     the same
                                               floats keep the sign; the
                                               minimum is +0.0
amax below 2**-100       as it is              scale 0, codes 0              as any other value
max - min below 2**-100  as it is              affine: min, scale 0, codes 0 (never affine)
a scale rounded to 0     (none)                scale 0, codes 0              refused below 2**-100
=======================  ====================  ============================  ==========================

"codes 0" are the codes of the number 0: bits 0 in two's complement, in floats and where affine;
2**(bits - 1) in offset binary (int3, int2); the level nearest to 0, of two the lower, in a table. Only tokens
that are protected from quantisation in a block that others close have code bits 0 whatever the codec. A NaN
scale is 0x7fc00000 in f32, 0x7e00 in f16, 0x7fc0 in bf16, 0x7f in e4m3, 0xff in e8m0, so that writers agree
in every byte; scale 0 is byte 0, which in e8m0 reads as 2**-127. So a NaN or inf in one block makes that
block read back as NaN and reaches no other. A kernel finds it for free: the maximum over
``bits & 0x7fffffff`` taken as integers orders finite < inf < NaN, so the amax it needs anyway is
>= 0x7f800000 exactly then.

How codes lie in bytes is ``kvgen.reference.packing``'s, scales ``kvgen.reference.scales``', the arithmetic of
a block ``kvgen.reference.blocks``'.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.errors import ArgumentError
from kvgen.ir import QuantSpec
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.reference.blocks import dequantise, quantise
from kvgen.reference.floats import bf16_to_f32, e4m3_to_f64, f32_to_bf16, f32_to_e4m3
from kvgen.reference.packing import pack_codes, unpack_codes

__all__ = [
    "NUMPY",
    "Array",
    "bf16_to_f32",
    "check_scale",
    "decode_values",
    "e4m3_to_f64",
    "encode_rows",
    "encode_static",
    "f32_to_bf16",
    "f32_to_e4m3",
    "int8_rows",
    "store_float",
    "stored_planes",
    "widen",
]

Array = npt.NDArray[Any]

NUMPY: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "bf16": np.dtype("<u2"),
    "f16": np.dtype("<f2"),
    "int8": np.dtype("i1"),
    **{name: np.dtype("u1") for name in ("int4x2", "e4m3", "e5m2", "e8m0", "u8x1", "u4x2", "u2x4", "u1x8")},
}
"""The numpy type that holds a storage type; bf16 and small floats as their bits."""


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
    """f32 [..., d] -> stored codes [..., d] (fewer where packed) and scales f32.

    One scale a row, f32 [...]; with ``block``, one for so many elements of d, f32 [..., d // block].
    scale = amax / qmax, code = round-to-nearest-even(x * (1 / scale)), all in f32, saturated to +-qmax.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    quant = _rows(fmt, block)
    coded = quantise(x.reshape(prod(x.shape[:-1]), 1, x.shape[-1]), quant)
    assert coded.scale is not None
    (codes,) = stored_planes(coded.codes, quant)
    shape = x.shape[:-1] if block is None else (*x.shape[:-1], x.shape[-1] // block)
    return codes.reshape(*x.shape[:-1], codes.shape[-1]), coded.scale.reshape(shape)


def encode_static(x: Array, scale: Array, fmt: str) -> Array:
    """f32 [..., head, d] -> stored codes [..., head, d] (fewer where packed) under scales f32 [] or [head].

    Inf and everything too large saturate; the table above says what NaN stores. Raises ``ArgumentError``
    for a scale that is not finite or below 2**-100 (1 / scale would not be a number to round with).
    """
    quant = QuantSpec(fmt)
    codes = quantise(np.asarray(x, dtype=np.float32), quant, given=check_scale(scale)).codes
    return stored_planes(codes, quant)[0]


def check_scale(scale: Array) -> Array:
    """A scale that a caller gives, as f32; ``ArgumentError`` where no kernel could divide by it."""
    scale = np.asarray(scale, dtype=np.float32)
    if not (np.isfinite(scale) & (scale >= np.float32(ZERO_BLOCK_AMAX))).all():
        raise ArgumentError("a static scale must be finite and at least 2**-100")
    return scale


def stored_planes(codes: Array, quant: QuantSpec) -> list[Array]:
    """Codes uint8 [..., d] -> what each plane of codes stores, in its type."""
    planes = quant.planes
    packed = pack_codes(codes, planes) if planes[0].packed > 1 else [codes]
    return [part.view(NUMPY[plane.storage]) for part, plane in zip(packed, planes, strict=True)]


def int8_rows(x: Array) -> Array:
    """Rows [..., d] in any type ``widen`` takes -> f64 [..., d]: what one int8 code per element and a scale
    per row stand for (``qk = "int8"``). A row with NaN or inf is NaN, one of zeros is zero."""
    codes, scale = encode_rows(widen(x).astype(np.float32), "int8")
    return decode_values(codes, "int8", scale)


def decode_values(codes: Array, fmt: str, scale: Array | None = None, block: int | None = None) -> Array:
    """Stored codes [..., d] (fewer where packed) -> the values they stand for, f64 [..., d].

    ``scale`` broadcasts against the codes without their last axis; with ``block`` its own last axis counts
    blocks of d. None for a plain format.
    """
    quant = _rows(fmt, block)
    if not quant.fmt.scaled:
        return widen(codes)
    if scale is None:
        raise ArgumentError(f"{fmt} codes mean nothing without their scales")
    bits = (
        unpack_codes([codes.view(np.uint8)], quant.planes)
        if quant.planes[0].packed > 1
        else codes.view(np.uint8)
    )
    wide = np.asarray(scale, dtype=np.float32)
    wide = np.broadcast_to(wide, codes.shape[:-1])[..., None] if block is None else wide
    return dequantise(bits[..., None, :], quant, wide[..., None, :], None, None)[..., 0, :]


def pack_nibbles(codes: Array) -> Array:
    """Codes int8 [..., d] of -8..7 -> bytes uint8 [..., d/2]: the first half of a row in the low nibbles."""
    return pack_codes(codes.view(np.uint8) & 15, _rows("int4", None).planes)[0]


def unpack_nibbles(stored: Array) -> Array:
    """The inverse of ``pack_nibbles``: uint8 [..., d/2] -> int8 [..., d]."""
    biased = unpack_codes([stored], _rows("int4", None).planes) ^ 8
    return biased.astype(np.int8) - np.int8(8)


def _rows(fmt: str, block: int | None) -> QuantSpec:
    """One scale for each row, or for each block of it."""
    return QuantSpec(fmt, ((("d", block),) if block else ()) + (("head", 1), ("tok", 1)))
