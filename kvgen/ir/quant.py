"""QuantSpec: how one of K and V is stored: its codec, what shares a scale, and where scales lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvgen.ir import codecs as _builtin  # noqa: F401  (registers them)
from kvgen.ir.codec import CODECS, PACKED_STORAGE, TABLE, Codec, with_levels
from kvgen.ir.layout import LayoutSpec

DTYPE_BYTES = {
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "int8": 1,
    "int4x2": 1,
    "e4m3": 1,
    "e5m2": 1,
    "e8m0": 1,
    "u8x1": 1,
    "u4x2": 1,
    "u2x4": 1,
    "u1x8": 1,
}
"""Bytes of one element of each storage type; ``int4x2`` and ``u4x2`` hold two codes, ``u2x4`` four, ``u1x8``
eight. ``e8m0`` is a power of two (a scale), stored as its biased exponent."""

PACKED = ("int4x2", "u4x2", "u2x4", "u1x8")
"""Storage types whose elements are bytes of several codes."""

Format = Codec
"""The older name."""

FORMATS = CODECS
"""Registered codecs by name."""

ZERO_BLOCK_AMAX = 2.0**-100
"""A block whose largest magnitude is below this counts as zero: scale 0, codes 0."""

SCALE_DTYPES = ("f32", "f16", "bf16", "e8m0", "e4m3")
"""Types of a stored scale; of one beside a minimum, the first three."""

SCALE_PLACES = ("page", "pool", "inline")
"""Where scales lie: in planes of the page, in a buffer of their own, or behind the codes of their row."""

GROUPS: tuple[tuple[str, ...], ...] = ((), ("head",), ("head", "tok"), ("d", "head", "tok"))
"""Dimensions that may carry a scale: per tensor, per head, per token (or block of tokens) and head, per
block of d (or element of d, where tokens share it) of those."""

D_BLOCK_STEP = 16
"""A block of d that shares a scale is a multiple of this many elements, or one element."""


@dataclass(frozen=True)
class CodePlane:
    """One plane of codes: ``bits`` bits of each code, the next ones above those of the plane before."""

    suffix: str
    """Of the plane's name: empty, or ``_top``."""
    bits: int
    storage: str
    """Storage type, a key of ``DTYPE_BYTES``."""
    packed: int
    """Codes in one stored element. Element j of a row of D / packed holds the codes
    j + i * (D / packed), i from the low bits upwards; see ``QuantSpec.planes`` for ``_top``."""


@dataclass(frozen=True)
class QuantSpec:
    """Storage of K or of V, or of a run of elements of one."""

    format: str
    """A key of ``CODECS``."""
    group: tuple[tuple[str, int], ...] = ()
    """Block of elements that share one scale, as sorted (dim, block); absent dims are spanned."""
    scale_dtype: str = "f32"
    """Type of a stored scale, and of the minimum beside it."""
    layout: LayoutSpec | None = None
    """Own inner axes (those right of ``kv``), or None for the cache's."""
    affine: bool = False
    """Whether an element is ``scale * code + min``."""
    outer: tuple[str, ...] | None = None
    """Dimensions (none, or ``head``) of a second, static f32 scale; None for no such scale."""
    scales: str = "page"
    """One of ``SCALE_PLACES``."""
    transform: str | None = None
    """``hadamard``: rows are rotated by the orthonormal Walsh-Hadamard matrix before they become codes."""
    mean: bool = False
    """Whether a static mean of each (head, element) is subtracted first (K)."""
    levels: tuple[float, ...] = ()
    """Levels of the codec ``table``."""
    measure: str = "amax"
    """Measure of the codec ``table``."""
    segments: tuple[tuple[int, QuantSpec], ...] = ()
    """Runs of d with storage of their own, as (elements, storage); this one's own keys then say nothing."""

    @property
    def fmt(self) -> Codec:
        """The registered codec, with the levels of this spec."""
        return (
            with_levels(self.levels, self.measure)
            if self.format == TABLE and self.levels
            else CODECS[self.format]
        )

    @property
    def scale_dims(self) -> tuple[str, ...]:
        """Dimensions along which scales differ, in the order ``d head tok``."""
        return tuple(dim for dim, _ in self.group)

    @property
    def d_block(self) -> int | None:
        """Elements of d that share a scale where a row has several, else None."""
        return dict(self.group).get("d")

    @property
    def tok_block(self) -> int:
        """Tokens that share a scale: 0 where all do (static), else 1 or more."""
        return dict(self.group).get("tok", 0)

    @property
    def spans(self) -> bool:
        """Whether codes of several tokens share a scale that an append must find: they are made together."""
        return any(q.spans for _, q in self.segments) or (self.fmt.scaled and self.tok_block > 1)

    @property
    def static_scale(self) -> bool:
        """Scales that an append cannot compute (no ``tok`` in the group): given up front."""
        return not self.segments and self.fmt.scaled and "tok" not in self.scale_dims

    @property
    def stored_scale(self) -> bool:
        """Whether pages hold scales."""
        return self.fmt.scaled and not self.static_scale

    @property
    def steps(self) -> float:
        """What a block's measure is divided by: the steps of an affine range, or the codec's qmax."""
        return (1 << self.fmt.bits) - 1 if self.affine else self.fmt.qmax or 1

    @property
    def planes(self) -> tuple[CodePlane, ...]:
        """Planes that hold the codes, low bits first.

        A second one (``_top``: one bit) keeps its bits beside the first's fourths: byte j of D / 8 holds in
        bit q, q from 0 to 3, the bit of element q * D/4 + j, and in bit 4 + q that of element
        q * D/4 + D/8 + j.
        """
        fmt = self.fmt
        if fmt.kind == "plain" or (fmt.own_storage and not self.affine):
            return (CodePlane("", fmt.bits, fmt.storage, fmt.packed),)
        return tuple(
            CodePlane("_top" if i else "", bits, PACKED_STORAGE[bits], 8 // bits)
            for i, bits in enumerate(fmt.plane_bits)
        )

    @property
    def direct(self) -> bool:
        """Whether kernels have operands of its own for it (today's formats under f32 scales of rows).

        Else its codes become numbers as they are read: ``Spec.direct`` also asks for raw rows.
        """
        plain = not (self.segments or self.affine or self.outer is not None or self.transform or self.mean)
        own_groups = self.tok_block <= 1 and self.d_block != 1
        return plain and self.fmt.fast and own_groups and self.scale_dtype == "f32"


@dataclass(frozen=True)
class Segment:
    """A run of elements of K's or V's rows in planes of their own."""

    plane: str
    """Name of its first plane and start of the others' names: ``k``, ``k1``, ``v``."""
    start: int
    """First element of d."""
    size: int
    """Elements of d."""
    quant: QuantSpec
    """How they are stored."""

    @property
    def codes(self) -> Iterator[tuple[str, CodePlane]]:
        """Name and description of each plane of codes."""
        return ((f"{self.plane}{plane.suffix}", plane) for plane in self.quant.planes)


def segments_of(side: str, width: int, quant: QuantSpec) -> tuple[Segment, ...]:
    """The segments of a row of ``width`` elements of ``k`` or ``v``, from its start on."""
    if not quant.segments:
        return (Segment(side, 0, width, quant),)
    found, start = [], 0
    for number, (size, own) in enumerate(quant.segments):
        found.append(Segment(f"{side}{number or ''}", start, size, own))
        start += size
    return tuple(found)
