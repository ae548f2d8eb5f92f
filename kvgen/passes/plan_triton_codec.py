"""How stored int8 codes become operands of a dot: K without any conversion, V two bytes at once.

K meets the query as int8: the query is split, once per program, into two int8 digits per element,
``q = unit * (DIGIT * high + low)``, within 2e-5 of its row's largest element. Two int8 products and one
integer multiply-add replace a conversion of every code of K.

V is contracted over tokens with f32-like weights, so its codes become f16, exactly: ``0x6400 | (code + 128)``
are the bits of ``1024 + 128 + code`` in f16, so a byte permute and a packed subtraction make two operands.
A tensor core wants two *tokens* in one register. Loaded as int16 words (two elements of a row), a register
holds the words of two tokens, whose low bytes make one operand and whose high bytes another: even and
odd elements become two dots. The bytes in the cache stay natural.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.ir import Plane, Spec, Target
from kvgen.passes.address import Address, address, plane_facts, simplify

INT8_WIDTH = 32
"""Narrowest d-part of int8 operands: the inner dimension of an int8 product, or 16 words of V."""

LARGEST_DIGIT = 254
"""Low digits per step of the high one: what fits -127..127 without a gap."""


@dataclass(frozen=True)
class Codec:
    """How tiles of int8 codes are read by one kernel."""

    digits: int
    """Low digits per high one where the query is split for an int8 K; 0 where it is not."""
    v_words: bool
    """Whether V is loaded as words and split by ``words_to_f16``."""
    asm: bool
    """Whether ``words_to_f16`` is PTX; else the same bits in plain Triton."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """Accumulators of one part of V: one, or even and odd elements."""
        return ("_even", "_odd") if self.v_words else ("",)


def codec_for(spec: Spec, target: Target, v_plane: Plane) -> Codec:
    """The codec of a spec on a target; an f32 query converts every code to f32 instead."""
    att = spec.attention
    if att.q_dtype == "f32":
        return Codec(0, False, False)
    digits = 0
    if spec.cache.k.format == "int8":
        # DIGIT * (q.k of the high digits) + (of the low ones) must stay below 2**31.
        digits = min(LARGEST_DIGIT, (2**31 - 1) // (127 * 127 * att.head_dim) - 1)
    # AMD's own conversion of int8 needs no detour through words.
    words = spec.cache.v.format == "int8" and not target.arch.startswith("gfx")
    return Codec(digits, words and word_plane(v_plane) is not None, not target.interpreted)


def word_plane(plane: Plane) -> Plane | None:
    """The plane of int8 pairs seen as two-byte words, None where pairs do not lie together and aligned."""
    axes = []
    for placed in plane.axes:
        axis = placed.axis
        stride = placed.stride
        if axis.dim == "d":
            if axis.part != "outer":
                if stride.fixed != 1 or stride.per_page:
                    return None
                stride = replace(stride, fixed=2)
            if placed.extent is None or axis.block % 2:
                return None
            halves = placed.extent if axis.part == "outer" else placed.extent // 2
            placed = replace(placed, axis=replace(axis, block=axis.block // 2), extent=halves, stride=stride)
        if stride.fixed % 2 or stride.per_page % 2:
            return None
        axes.append(placed)
    if plane.offset.fixed % 2 or plane.offset.per_page % 2:
        return None
    return replace(plane, dtype="f16", axes=tuple(axes))  # f16: the type of two bytes that strides count in


def word_address(plane: Plane) -> Address:
    """The address of a word plane: ``d`` counts words, strides are in words."""
    return simplify(address(plane), plane_facts(plane))
