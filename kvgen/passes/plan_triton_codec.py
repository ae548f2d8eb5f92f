"""How stored codes become operands of a dot. The bytes in the cache stay natural.

The query meets K in one of four ways (``Codec.q``):

``plain``   in a type that holds both.
``digits``  K's codes as int8, unconverted: the query is split, once per program, into two int8 digits per
            element, ``q = unit * (DIGIT * high + low)``, within 2e-5 of its row's largest element. Two int8
            products and one integer multiply-add replace a conversion of every code of K.
``codes``   the same with one digit: what ``qk = "int8"`` asks for.
``units``   K as f16, and a bf16 query as f16 in units of a power of two, one a row, so that it fits.

Where V is a part of K (MLA), one load serves both, so K is read as V has to be: as f16. Keys that are rotated
when they are read become f16 as well, one element after another.

V is contracted over tokens with weights of many magnitudes, so its codes become f16, exactly. A tensor core
wants two *tokens* in one register. Loaded as int16 words (two bytes of a row), a register holds the words of
two tokens, whose low bytes make one operand and whose high bytes another: even and odd bytes become two
dots ("lanes"). Nibbles make four. K in e4m3 is read the same way: its operands then have 16 bits from the
load on, and q is fetched four times wider.

int8    ``0x6400 | (code + 128)`` are the bits of ``1024 + 128 + code`` in f16: a byte permute and a packed
        subtraction make two operands.
int4    two's complement nibbles. To int8, shifted up to 16 times their value, two operations for each eight
        codes; to f16 as int8 above.
e4m3    the processor's own conversion where it has one (sm_89 and later). Else the bits of the code moved to
        where f16 has them are 2**-8 of the value, denormals included; the factor goes into a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.errors import UnsupportedError
from kvgen.ir import PageRecord, Spec, Target
from kvgen.passes.plan_triton_words import word_plane

LARGEST_DIGIT = 254
"""Low digits per step of the high one: what fits -127..127 without a gap."""

INT8_WIDTH = 32
"""Narrowest d-part of int8 operands: the inner dimension of an int8 product, or 16 words of V."""


@dataclass(frozen=True)
class Reader:
    """How loads of one side become operands."""

    helper: str = ""
    """Function of the module that makes operands of a loaded tile; empty where the load is one."""
    lanes: tuple[str, ...] = ("",)
    """Suffixes of the operands of one tile. ``_low``, ``_high``: halves of a row. ``_even``, ``_odd``:
    neighbours within a word."""
    word: int = 1
    """Stored elements in one loaded element: 2 where bytes are loaded as int16."""
    factor: float = 1.0
    """A value is this times its operand."""
    kind: str = ""
    """Type of the operands that ``helper`` returns."""


@dataclass(frozen=True)
class Codec:
    """How one kernel reads the cache."""

    q: str
    """``plain``, ``digits``, ``codes`` or ``units``."""
    digit: int
    """Low digits per high one (``digits``), else 1."""
    k: Reader
    v: Reader
    ptx: bool
    """Whether helpers are PTX; else the same bits in plain Triton."""
    fp8: bool
    """Whether the processor converts e4m3 by itself."""
    nan_codes: bool
    """Whether a code of e4m3 may be NaN (scales that are given cannot be NaN instead)."""

    @property
    def helpers(self) -> frozenset[str]:
        """Functions that the module needs."""
        return frozenset({self.k.helper, self.v.helper} - {""})


def codec_for(spec: Spec, target: Target, record: PageRecord) -> Codec:
    """The codec of a spec on a target.

    Raises UnsupportedError for ``pv = "int8"``, and for ``qk = "int8"`` beside an f32 query or where V is a
    part of K.
    """
    att, k, v = spec.attention, spec.cache.k, spec.cache.v
    if att.pv == "int8":
        raise UnsupportedError(
            'attention.pv = "int8": Triton kernels have no 8-bit weights; use pv = "exact" (V in f16)'
        )
    if att.qk == "int8" and spec.cache.alias:
        raise UnsupportedError(
            'attention.qk = "int8" with cache.v.alias: one load serves K and V, as f16; use qk = "exact"'
        )
    if att.qk == "int8" and att.q_dtype == "f32":
        raise UnsupportedError(
            'attention.qk = "int8" with q_dtype = "f32": use qk = "exact", or a bf16 or f16 query'
        )
    fp8 = target.arch.startswith("sm_") and int(target.arch[3:]) >= 89
    ptx = target.arch.startswith("sm_")
    wide = att.q_dtype == "f32"
    q, digit = "plain", 1
    shared = spec.cache.alias
    turned = att.rope is not None and att.rope.stored == "pre"
    if k.fmt.integer and not wide and not shared and not turned:
        q = "codes" if att.qk == "int8" else "digits"
        if q == "digits":
            # DIGIT * (q.k of the high digits) + (of the low ones) must stay below 2**31.
            digit = min(LARGEST_DIGIT, (2**31 - 1) // (127 * 128 * att.head_dim) - 1)
    elif k.fmt.scaled and att.q_dtype == "bf16":
        q = "units"
    words = {
        side: not wide and not target.arch.startswith("gfx") and word_plane(record.plane(side)) is not None
        for side in ("k", "v")
    }
    v_reader = _v_reader(v.format, words["v"], wide, fp8)
    return Codec(
        q,
        digit,
        v_reader if shared else _k_reader(k.format, q, words["k"] and not turned, wide, fp8),
        v_reader,
        ptx,
        fp8,
        any(s.format == "e4m3" and s.static_scale for s in (k, v)),
    )


def row_codec(spec: Spec) -> Codec:
    """How ops without dots read rows: every code as a float, in plain Triton."""
    return Codec(
        "plain",
        1,
        _k_reader(spec.cache.k.format, "plain", False, True, False),
        _v_reader(spec.cache.v.format, False, True, False),
        False,
        False,
        any(s.format == "e4m3" and s.static_scale for s in (spec.cache.k, spec.cache.v)),
    )


def _k_reader(fmt: str, q: str, words: bool, wide: bool, fp8: bool) -> Reader:
    if fmt == "e4m3":
        return _e4m3(words, fp8)
    if fmt == "int4" and q in ("digits", "codes"):
        return Reader("nibbles_x16", ("_low", "_high"), 1, 1 / 16, "int8")
    if fmt == "int4":
        return Reader("nibbles", ("_low", "_high"), 1, 1.0, "f32" if wide else "f16")
    return Reader()


def _v_reader(fmt: str, words: bool, wide: bool, fp8: bool) -> Reader:
    """AMD converts int8 by itself without the detour through words."""
    if fmt == "int8" and words:
        return Reader("words_to_f16", ("_even", "_odd"), 2, 1.0, "f16")
    if fmt == "int4" and words:
        lanes = ("_low_even", "_high_even", "_low_odd", "_high_odd")
        return Reader("nibble_words_to_f16", lanes, 2, 1.0, "f16")
    if fmt == "int4":
        return Reader("nibbles", ("_low", "_high"), 1, 1.0, "f32" if wide else "f16")
    return _e4m3(words, fp8) if fmt == "e4m3" else Reader()


def _e4m3(words: bool, fp8: bool) -> Reader:
    factor = 1.0 if fp8 else 256.0
    if words:
        return Reader("e4m3_words_to_f16", ("_even", "_odd"), 2, factor, "f16")
    return Reader("e4m3_to_f16", ("",), 1, factor, "f16")
