"""rope: rotary position embedding of rows, and the table of angles, as plainly as they can be written."""

from __future__ import annotations

import numpy as np

from kvgen.ir import RopeSpec
from kvgen.reference.codec import Array


def rope_table(frequencies: list[float], factor: float, positions: int) -> Array:
    """f32 [positions, dim]: cosines of dim / 2 angles, then their sines, both times ``factor``.

    An angle is the f32 product of a position and an f32 frequency, as in transformers' models.
    """
    steps = np.asarray(frequencies, np.float64).astype(np.float32)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * steps).astype(np.float64)
    return np.concatenate([np.cos(angles) * factor, np.sin(angles) * factor], axis=1).astype(np.float32)


def rotate(x_THD: Array, table_TR: Array, rope: RopeSpec) -> Array:
    """Rows rotated by their angles, in the type of ``x``; ``table_TR`` holds each token's row of the table.

    In f32 every product is rounded before the sum is: the order that kernels keep, byte for byte.
    """
    half = rope.dim // 2
    cos, sin = (table_TR[:, None, :half].astype(x_THD.dtype), table_TR[:, None, half:].astype(x_THD.dtype))
    first, second = pair_indices(rope)
    a, b = x_THD[..., first], x_THD[..., second]
    turned = x_THD.copy()
    with np.errstate(all="ignore"):  # rows may hold inf
        turned[..., first] = a * cos - b * sin
        turned[..., second] = b * cos + a * sin
    return turned


def pair_indices(rope: RopeSpec) -> tuple[Array, Array]:
    """Elements that are rotated together: the first and the second of each pair."""
    at = np.arange(rope.dim // 2)
    return (at, at + rope.dim // 2) if rope.pairing == "half" else (2 * at, 2 * at + 1)
