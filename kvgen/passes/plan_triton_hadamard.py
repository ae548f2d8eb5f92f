"""plan the Walsh-Hadamard transform of rows in Triton: the call of ``hadamard`` in ``_hadamard.jinja``.

Stage by stage the pairs at distance D/2, D/4, ... 1 become their sum and their difference, in f32; then
everything is multiplied by ``f32(D ** -0.5)``. The order is part of the format: writers agree in every bit.
"""

from __future__ import annotations

from struct import pack, unpack


def hadamard_text(rows: str, width: int) -> str:
    """The rotated rows of an f32 tile [R, ``width``], a power of two, as text."""
    return f"hadamard({rows}, {width.bit_length() - 1}, {to_f32(width**-0.5)!r})"


def to_f32(x: float) -> float:
    """The f32 nearest to ``x``: constants are printed as the numbers that kernels see."""
    return float(unpack("<f", pack("<f", x))[0])
