"""packing: codes of a row as unsigned bit fields <-> the bytes of their planes.

Byte j of a row of D / n bytes (n codes a byte, of b bits each) holds element j + i * (D / n) in its bits
b * i and up: int4 in halves, int2 in fourths. Codes of three bits are two planes: the low two bits in
fourths, and the top bits of the four fourths side by side (``QuantSpec.planes``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.ir.quant import CodePlane

Array = npt.NDArray[Any]


def pack_codes(codes: Array, planes: tuple[CodePlane, ...]) -> list[Array]:
    """Codes uint8 [..., D] -> the bytes of each plane, uint8 [..., D / packed]."""
    found = [_fold(codes & ((1 << planes[0].bits) - 1), planes[0].bits)]
    if len(planes) == 2:
        found.append(_fold_top(codes >> planes[0].bits))
    return found


def unpack_codes(stored: list[Array], planes: tuple[CodePlane, ...]) -> Array:
    """The inverse of ``pack_codes``."""
    low = _unfold(stored[0], planes[0].bits)
    return low if len(planes) == 1 else low | _unfold_top(stored[1]) << planes[0].bits


def _fold(codes: Array, bits: int) -> Array:
    parts = np.split(codes.astype(np.uint8), 8 // bits, axis=-1)
    found = parts[0].copy()
    for i, part in enumerate(parts[1:], 1):
        found |= part << (bits * i)
    return found


def _unfold(stored: Array, bits: int) -> Array:
    mask = np.uint8((1 << bits) - 1)
    return np.concatenate([stored >> (bits * i) & mask for i in range(8 // bits)], axis=-1)


def _fold_top(bits: Array) -> Array:
    """One bit for each element: bit q of byte j is of q * D/4 + j, bit 4 + q of q * D/4 + D/8 + j."""
    fourths = np.split(bits.astype(np.uint8), 4, axis=-1)
    eighth = bits.shape[-1] // 8
    found = np.zeros((*bits.shape[:-1], eighth), np.uint8)
    for q, part in enumerate(fourths):
        found |= part[..., :eighth] << q
        found |= part[..., eighth:] << (4 + q)
    return found


def _unfold_top(stored: Array) -> Array:
    one = np.uint8(1)
    parts = [np.concatenate([stored >> q & one, stored >> (4 + q) & one], axis=-1) for q in range(4)]
    return np.concatenate(parts, axis=-1)
