"""QuantSpec: how one of K and V is stored; FORMATS: the registered number formats."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir.layout import LayoutSpec

DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1, "int4x2": 1, "e4m3": 1}
"""Bytes of one element of each storage type; an ``int4x2`` holds two codes."""


@dataclass(frozen=True)
class Format:
    """A number format: its storage type and, where values are scaled codes, their range."""

    name: str
    """Name used in a spec."""
    storage: str
    """Storage type, a key of ``DTYPE_BYTES``."""
    qmax: int | None
    """Largest code of a scaled format (codes are -qmax..qmax); None for a plain float."""
    packed: int = 1
    """Codes in one stored element. Where it is two, element j of a row of D codes holds code j in its low
    half and code j + D/2 in its high one, so that a half row is unpacked without any interleaving."""
    integer: bool = False
    """Whether a code is an integer: what integer arithmetic (``qk``, ``pv`` = ``int8``) needs."""

    @property
    def scaled(self) -> bool:
        """Whether an element is ``scale * code``."""
        return self.qmax is not None


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("f32", "f32", None),
        Format("bf16", "bf16", None),
        Format("f16", "f16", None),
        Format("int8", "int8", 127, integer=True),
        Format("int4", "int4x2", 7, packed=2, integer=True),
        # OCP e4m3fn: no infinities, largest value 448.
        Format("e4m3", "e4m3", 448),
    )
}
"""Registered formats by name. Adding one here brings it into specs, oracle, tests and docs."""

ZERO_BLOCK_AMAX = 2.0**-100
"""A block whose largest magnitude is below this counts as zero: scale 0, codes 0."""

GROUPS: tuple[tuple[str, ...], ...] = ((), ("head",), ("head", "tok"), ("d", "head", "tok"))
"""Dimensions that may carry a scale: per tensor, per head, per token and head, per block of d of those."""

D_BLOCK_STEP = 16
"""A block of d that shares a scale is a multiple of this many elements."""


@dataclass(frozen=True)
class QuantSpec:
    """Storage of K or of V."""

    format: str
    """A key of ``FORMATS``."""
    group: tuple[tuple[str, int], ...] = ()
    """Block of elements that share one scale, as sorted (dim, block); absent dims are spanned."""
    scale_dtype: str = "f32"
    """Type of a stored scale."""
    layout: LayoutSpec | None = None
    """Own inner axes (those right of ``kv``), or None for the cache's."""

    @property
    def fmt(self) -> Format:
        """The registered format."""
        return FORMATS[self.format]

    @property
    def scale_dims(self) -> tuple[str, ...]:
        """Dimensions along which scales differ, in the order ``d head tok``."""
        return tuple(dim for dim, _ in self.group)

    @property
    def d_block(self) -> int | None:
        """Elements of d that share a scale where a row has several, else None."""
        return dict(self.group).get("d")

    @property
    def static_scale(self) -> bool:
        """Scales that an append cannot compute (no ``tok`` in the group): given up front."""
        return self.fmt.scaled and "tok" not in self.scale_dims
