"""scales: a block's scale in the type in which it is stored, and back.

f32 scales are rounded to nearest even and saturate at the largest finite value of their type. ``e8m0`` is
a power of two by OCP MX 1.0: the exponent of the block's largest magnitude less that of the codec's largest
code. A scale that is NaN (a block that holds NaN or inf) stays NaN in every type; zero stays zero, but in
e8m0, which has none: there byte 0, whose codes are zeros.
"""

from __future__ import annotations

from math import floor, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.reference.floats import bf16_to_f32, e4m3_to_f64, f32_to_bf16, f32_to_e4m3

Array = npt.NDArray[Any]

LARGEST = {
    "f32": float(np.finfo(np.float32).max),
    "f16": 65504.0,
    "bf16": 2.0**127 * (2 - 2.0**-7),
    "e4m3": 448.0,
}
"""Largest finite value of each type of scale."""


def store_scale(scale: Array, dtype: str) -> Array:
    """f32 [...], positive, zero or NaN -> what is stored [...] (bf16 and e4m3 as their bits)."""
    scale = np.asarray(scale, dtype=np.float32)
    kept = np.where(scale > LARGEST[dtype], np.float32(LARGEST[dtype]), scale).astype(np.float32)
    kept = np.where(kept < -LARGEST[dtype], np.float32(-LARGEST[dtype]), kept).astype(np.float32)
    if dtype == "f32":
        return canonical_nan(kept)
    if dtype == "bf16":
        return np.where(np.isnan(kept), np.uint16(0x7FC0), f32_to_bf16(kept)).astype(np.uint16)
    if dtype == "e4m3":
        return f32_to_e4m3(kept)
    half = kept.astype(np.float16)
    return (
        np.where(np.isnan(kept), np.uint16(0x7E00), half.view(np.uint16)).astype(np.uint16).view(np.float16)
    )


def store_power(amax: Array, qmax: float, bad: Array, live: Array) -> Array:
    """The e8m0 byte [...] of blocks whose largest magnitude is ``amax``, f32 [...]."""
    bits = np.ascontiguousarray(amax, dtype=np.float32).view(np.uint32)
    exponent = (bits >> 23 & 0xFF).astype(np.int64) - floor(log2(qmax))
    byte = np.where(live, np.clip(exponent, 0, 254), 0)
    return np.where(bad, 255, byte).astype(np.uint8)


def load_scale(stored: Array, dtype: str) -> Array:
    """What is stored [...] -> f32 [...], exact."""
    if dtype == "bf16":
        return bf16_to_f32(stored)
    if dtype == "e4m3":
        return e4m3_to_f64(stored).astype(np.float32)
    if dtype == "e8m0":
        byte = np.asarray(stored, dtype=np.int64)
        return np.where(byte == 255, np.nan, np.exp2(byte - 127.0)).astype(np.float32)
    return np.asarray(stored).astype(np.float32)


def canonical_nan(x: Array) -> Array:
    """f32 [...] with every NaN as 0x7fc00000: writers agree in every byte."""
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32)
