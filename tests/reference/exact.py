"""The rules of codecs said once more, in exact fractions and one number at a time.

It shares nothing with ``kvgen.reference`` but the facts of a codec: a float's numbers are counted up from 0
by its steps, and each operation in f32 is the exact result, rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvgen.ir import QuantSpec
from kvgen.ir.codec import Codec

SMALLEST = Fraction(2) ** -100

TYPES = {
    "f32": (23, -126, (2 - Fraction(2) ** -23) * Fraction(2) ** 127),
    "bf16": (7, -126, (2 - Fraction(2) ** -7) * Fraction(2) ** 127),
    "f16": (10, -14, Fraction(65504)),
    "e4m3": (3, -6, Fraction(448)),
}
"""Bits of mantissa, least exponent of a normal number, largest finite value."""


def nearest(x: Fraction, mantissa: int, least: int, largest: Fraction) -> Fraction:
    """The nearest number with so many bits, ties to even, saturated."""
    if x < 0:
        return -nearest(-x, mantissa, least, largest)
    if x == 0:
        return x
    power = x.numerator.bit_length() - x.denominator.bit_length()
    power = max(least, power if Fraction(2) ** power <= x else power - 1)
    step = Fraction(2) ** (power - mantissa)
    return min(round(x / step) * step, largest)  # round() of a fraction takes ties to even


def f32(x: Fraction) -> Fraction:
    """One operation of f32 that does not overflow."""
    return nearest(x, *TYPES["f32"])


@lru_cache
def magnitudes(codec: Codec) -> tuple[Fraction, ...]:
    """The numbers of a float from 0 up, in the order of their codes, infinity and NaN left out."""
    numbers = [Fraction(0)]
    lost = {"none": 0, "nan": 1, "ieee": 1 << codec.mantissa}[codec.special]
    for code in range((1 << (codec.bits - 1)) - lost - 1):
        binade = max(0, (code >> codec.mantissa) - 1)
        numbers.append(numbers[-1] + Fraction(2) ** (1 - codec.bias - codec.mantissa + binade))
    return tuple(numbers)


def number(code: int, quant: QuantSpec) -> Fraction | None:
    """What a code stands for before its scale; None for infinity and NaN."""
    codec = quant.fmt
    if codec.kind == "float":
        size, half = magnitudes(codec), 1 << (codec.bits - 1)
        if code % half >= len(size):
            return None
        return -size[code - half] if code >= half else size[code]
    if codec.kind == "table":
        return Fraction(float(np.float32(codec.levels[min(code, len(codec.levels) - 1)])))
    if quant.affine:
        return Fraction(code)
    half = 1 << (codec.bits - 1)
    return Fraction(code - half if codec.offset else code - 2 * half if code >= half else code)


def code(x: Fraction, negative: bool, quant: QuantSpec) -> int:
    """The code of a number already divided by its scale; ``negative`` is its sign bit."""
    codec = quant.fmt
    if codec.kind == "float":
        size = magnitudes(codec)
        at = size.index(nearest(abs(x), codec.mantissa, 1 - codec.bias, size[-1]))
        return at + ((1 << (codec.bits - 1)) if negative else 0)
    if codec.kind == "table":
        levels = [Fraction(float(np.float32(level))) for level in codec.levels]
        return sum(x > f32(f32(a + b) / 2) for a, b in pairwise(levels))
    if quant.affine:
        return max(0, min(round(x), (1 << codec.bits) - 1))
    top = int(codec.qmax or 0)
    whole = max(-top, min(round(x), top))
    return whole + (1 << (codec.bits - 1)) if codec.offset else whole % (1 << codec.bits)


Number = Fraction | None
"""None stands for NaN."""


def block(
    xs: Sequence[float], quant: QuantSpec, outer: float | None = None
) -> tuple[list[int], Number, Number]:
    """The codes of a block of f32 numbers; its scale and minimum (0 where it has none) as they are read."""
    kind = TYPES.get(quant.scale_dtype)
    zeros = [0 if quant.affine else code(Fraction(0), False, quant)] * len(xs)
    if not all(map(math.isfinite, xs)):
        return zeros, None, None if quant.affine else Fraction(0)
    exact = [Fraction(float(x)) for x in xs]
    low, amax = Fraction(0), max(map(abs, exact))
    if quant.affine:
        assert kind is not None
        reach = max(exact) - min(exact)
        if f32(reach) == TYPES["f32"][2] and reach > f32(reach) + Fraction(2) ** 102:
            return zeros, None, None  # it overflows in f32
        low = nearest(min(exact), *kind)
        if f32(reach) < SMALLEST:
            return zeros, Fraction(0), low
        scale = nearest(f32(f32(reach) / ((1 << quant.fmt.bits) - 1)), *kind)
    elif amax < SMALLEST:
        return zeros, Fraction(0), low
    elif kind is None:
        power = math.floor(math.log2(quant.fmt.qmax or 1))
        scale = Fraction(2) ** (math.frexp(float(amax))[1] - 1 - power)
    else:
        above = Fraction(1) if outer is None else Fraction(float(outer))
        if quant.fmt.measure == "rms":
            squares = sum((x * x for x in exact), Fraction(0)) / len(xs)
            root = f32(Fraction(math.sqrt(squares * Fraction(2) ** 400)) / Fraction(2) ** 200)
        else:
            root = f32(amax / Fraction(float(np.float32(quant.fmt.qmax or 1))))
        scale = nearest(f32(root / above), *kind)
    if scale == 0:
        return zeros, scale, low
    whole = scale if outer is None else f32(scale * Fraction(float(outer)))
    inverse = f32(1 / whole)
    signs = [math.copysign(1.0, x) < 0 for x in xs]
    found = [code(f32(f32(x - low) * inverse), sign, quant) for x, sign in zip(exact, signs, strict=True)]
    return found, scale, low
