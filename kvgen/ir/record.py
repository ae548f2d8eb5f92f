"""PageRecord: where each element of a cache lies. Derived by ``passes.place``, never written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.ir.layout import Axis
from kvgen.ir.quant import DTYPE_BYTES, PACKED


@dataclass(frozen=True)
class Extent:
    """A byte count that may grow with the pool: ``fixed + per_page * num_pages``."""

    fixed: int
    """Bytes that do not depend on the pool."""
    per_page: int = 0
    """Bytes for each page of the pool."""

    def at(self, num_pages: int) -> int:
        """The count for a pool of ``num_pages`` pages."""
        return self.fixed + self.per_page * num_pages

    def __add__(self, other: Extent) -> Extent:
        return Extent(self.fixed + other.fixed, self.per_page + other.per_page)

    def times(self, factor: int) -> Extent:
        """This count ``factor`` times."""
        return Extent(self.fixed * factor, self.per_page * factor)

    def to_dict(self) -> dict[str, int]:
        """Plain values."""
        return {"fixed": self.fixed, "per_page": self.per_page}

    def __str__(self) -> str:
        if not self.per_page:
            return str(self.fixed)
        head = f"{self.fixed} + " if self.fixed else ""
        return f"{head}{self.per_page} * num_pages"


@dataclass(frozen=True)
class PlaneAxis:
    """One axis of a plane: its extent (None = num_pages) and its stride in bytes."""

    axis: Axis
    extent: int | None
    stride: Extent
    constant: bool
    """Whether the stride is fixed by the spec (inside a page) or passed at run time."""


@dataclass(frozen=True)
class Plane:
    """One field of the cache: codes, scales or raw rows of K or V."""

    name: str
    """``k``, ``v`` (further segments: ``k1``), these with ``_top``, ``_scale`` or ``_min``; ``k_raw``,
    ``v_raw``."""
    dtype: str
    """Storage type."""
    pool: str
    """The buffer it lies in: ``kv``, ``k`` or ``v``; scales may have one of their own (``kv_scale``)."""
    offset: Extent
    """Bytes from the start of the pool to the element with all indices 0."""
    axes: tuple[PlaneAxis, ...]
    """Axes outermost first."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def unit(self) -> str:
        """What strides count, as a comment calls it: a stored element may hold several codes."""
        return "bytes" if self.dtype in PACKED else "elements"

    @property
    def page(self) -> PlaneAxis:
        """The page axis."""
        return next(a for a in self.axes if a.axis.dim == "page")

    @property
    def inside(self) -> tuple[PlaneAxis, ...]:
        """Axes with constant strides, outermost first: what lies inside one page."""
        return tuple(a for a in self.axes if a.constant)

    @property
    def outside(self) -> tuple[PlaneAxis, ...]:
        """Axes with run-time strides other than ``page`` (they stand left of it in the layout)."""
        return tuple(a for a in self.axes if not a.constant and a.axis.dim != "page")

    def index_sizes(self) -> dict[str, int]:
        """How many indices each dimension has, ``page`` left out.

        An outer axis without its inner half holds one scale for a block of elements: it is indexed by the
        element.
        """
        inner = {a.axis.dim for a in self.axes if a.axis.part == "inner"}
        sizes: dict[str, int] = {}
        for a in self.axes:
            if a.extent is not None:
                alone = a.axis.part == "outer" and a.axis.dim not in inner
                steps = a.extent * (a.axis.block if alone else 1)
                sizes[a.axis.dim] = sizes.get(a.axis.dim, 1) * steps
        return sizes

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Extents outermost first for a pool of ``num_pages``."""
        return tuple(num_pages if a.extent is None else a.extent for a in self.axes)

    def strides(self, num_pages: int) -> tuple[int, ...]:
        """Strides in elements, in the order of ``shape``."""
        return tuple(a.stride.at(num_pages) // self.itemsize for a in self.axes)

    def span(self) -> int:
        """Bytes from the first to past the last element inside one page (run-time axes at 0)."""
        steps = sum((a.extent - 1) * a.stride.fixed for a in self.inside if a.extent is not None)
        return steps + self.itemsize


@dataclass(frozen=True)
class PageRecord:
    """All planes of a cache."""

    planes: tuple[Plane, ...]
    """Planes in memory order: each scale plane follows its data plane."""
    pools: tuple[tuple[str, Extent], ...]
    """Buffers and their size in bytes."""
    align: int
    """Bytes on which planes start."""
    raw: tuple[Plane, ...] = ()
    """``k_raw`` and ``v_raw`` where some tokens are left unquantised; their pages are raw rows. Not among
    ``planes``: their pool ``raw`` is sized by raw rows."""

    def plane(self, name: str) -> Plane:
        """The plane called ``name``; ``KeyError`` where the cache has none.

        Where V is a part of K, K's planes are V's too.
        """
        aliased = name.startswith("v") and not self.has("v")
        wanted = "k" + name[1:] if aliased else name
        for plane in self.planes + self.raw:
            if plane.name == wanted:
                return plane
        raise KeyError(name)

    def has(self, name: str) -> bool:
        """Whether the cache has a plane called ``name``."""
        return any(plane.name == name for plane in self.planes + self.raw)

    def raw_bytes(self) -> int:
        """Bytes of one raw row: a page's unquantised tokens."""
        return self.raw[0].page.stride.fixed if self.raw else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values: enough for someone else's allocator to lay the cache out. Counts are bytes."""
        found = {
            "align": self.align,
            "page_bytes": self.page_bytes(),
            "pools": {name: size.to_dict() for name, size in self.pools},
            "planes": [_plane_to_dict(plane) for plane in self.planes],
        }
        return found | ({"raw": [_plane_to_dict(plane) for plane in self.raw]} if self.raw else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PageRecord:
        """The inverse of ``to_dict``."""
        planes, raw = (tuple(map(_plane_from_dict, values.get(key, ()))) for key in ("planes", "raw"))
        pools = tuple((name, Extent(**size)) for name, size in values["pools"].items())
        return cls(planes, pools, values["align"], raw)

    def page_bytes(self) -> int:
        """Bytes one page costs over all pools, padding included."""
        return sum(extent.per_page for _, extent in self.pools)


def _plane_to_dict(plane: Plane) -> dict[str, Any]:
    return {
        "name": plane.name,
        "dtype": plane.dtype,
        "pool": plane.pool,
        "offset": plane.offset.to_dict(),
        "axes": [
            {
                "axis": str(placed.axis),
                "extent": placed.extent,
                "stride": placed.stride.to_dict(),
                "constant": placed.constant,
            }
            for placed in plane.axes
        ],
    }


def _plane_from_dict(plane: Mapping[str, Any]) -> Plane:
    axes = tuple(
        PlaneAxis(Axis.read(a["axis"]), a["extent"], Extent(**a["stride"]), a["constant"])
        for a in plane["axes"]
    )
    return Plane(plane["name"], plane["dtype"], plane["pool"], Extent(**plane["offset"]), axes)
