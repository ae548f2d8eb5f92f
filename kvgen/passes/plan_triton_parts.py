"""What every Triton template asks: d-parts with their names, kernel parameters, divisibility promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvgen.ir import PageRecord, Spec
from kvgen.ir.plan import Arg
from kvgen.passes.lower import d_parts
from kvgen.passes.plan_triton_types import POINTER

MIN_WIDTH = 16
"""Narrowest d-part: what a tensor core takes along its inner dimension."""

LONGEST = 2**30
"""Tokens of one request that positions are computed for in 32 bits; a wider window sees all of them."""


@dataclass(frozen=True)
class DPart:
    """One range of d, with the names its tiles carry in the source."""

    tag: str
    """Empty where a row is one tile, else the part's number: ``k_TD``, ``k1_TD``."""
    start: int
    width: int
    valid: int

    @property
    def padded(self) -> bool:
        """Whether the tile is wider than what exists."""
        return self.valid < self.width

    def index(self, lanes: int = 1) -> str:
        """The element indices of the tile, or those of words of ``lanes`` elements."""
        span = f"tl.arange(0, {self.width // lanes})"
        return f"{self.start // lanes} + {span}" if self.start else span


@dataclass(frozen=True)
class Param:
    """One parameter of a ``@triton.jit`` function."""

    name: str
    """Name in the source; pointers end in ``_ptr``."""
    value: str
    """Name under which a launch gives it."""
    kind: str
    """Triton type in a signature: ``*bf16``, ``i64``, ``i32``, ``fp32``."""
    doc: str

    @property
    def annotation(self) -> str:
        """Type annotation: integers keep their width whatever their value; pointers carry theirs."""
        return {"i64": ": tl.int64", "i32": ": tl.int32", "fp32": ": tl.float32"}.get(self.kind, "")


@dataclass(frozen=True)
class Entry:
    """One kernel of a rendered module."""

    name: str
    params: tuple[Param, ...]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True
    """Whether a*b+c may become one FMA: never where bytes must equal the oracle's."""


def split_d(size: int, narrowest: int = MIN_WIDTH) -> tuple[DPart, ...]:
    """A head's elements as tiles: 72 = 64 + 8 of 16; 576 = 512 + 64."""
    parts = d_parts(size, 512, narrowest)
    return tuple(
        DPart("" if len(parts) == 1 else str(i), p.start, p.width, p.valid) for i, p in enumerate(parts)
    )


def params(args: Iterable[Arg], names: Sequence[str] | None = None) -> tuple[Param, ...]:
    """The parameters for ABI arguments (all of them, or those named, in ABI order)."""
    return tuple(_param(arg) for arg in args if names is None or arg.name in names)


def scalar(name: str, doc: str) -> Param:
    """A 32-bit count that a launcher computes."""
    return Param(name, name, "i32", doc)


def _param(arg: Arg) -> Param:
    if arg.kind == "ptr":
        return Param(f"{arg.name}_ptr", arg.name, POINTER[arg.dtype], f"{arg.dtype}: {arg.doc}")
    # Strides multiply page ids and rows: 64 bits. Counts do not.
    wide = "_stride_" in arg.name or arg.name.endswith("_stride") or arg.name == "table_stride"
    return Param(arg.name, arg.name, {"f64": "fp32"}.get(arg.kind, "i64" if wide else "i32"), arg.doc)


def aligned(spec: Spec, record: PageRecord) -> frozenset[str]:
    """Values that are multiples of 16 for every cache placed by this record, by ABI name.

    Pointers in bytes (buffers start on 64), strides in elements: what lets loads be 16 bytes wide. A
    launch checks them, because an adopted buffer may have other strides.
    """
    found = set()
    for plane in record.planes:
        if all(n % 16 == 0 for n in (plane.offset.fixed, plane.offset.per_page)):
            found.add(plane.name)
        for placed in (plane.page, *plane.outside):
            unit = 16 * plane.itemsize
            if placed.stride.fixed % unit == 0 and placed.stride.per_page % unit == 0:
                found.add(f"{plane.name}_stride_{placed.axis.key}")
    return frozenset(found)
