"""CacheSpec: how K and V lie in memory, page by page."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from kvgen.ir.layout import Axis, LayoutSpec
from kvgen.ir.quant import QuantSpec
from kvgen.ir.raw import RawSpec

PRESETS = {"fast": "page kv head tok d"}
"""Layout names that stand for a rule of the target, and the layout that a spec shows until it is known."""


@dataclass(frozen=True)
class CacheSpec:
    """A paged KV cache. The page table is a view chosen per call, not part of this."""

    page_size: int
    """Tokens in a page."""
    layout: LayoutSpec
    """Order of axes shared by K and V."""
    align: int
    """Bytes on which planes start: a power of two, 1 to 4096."""
    k: QuantSpec
    """Storage of K."""
    v: QuantSpec
    """Storage of V."""
    preset: str | None = None
    """Name of a rule that replaces ``layout`` once the target is known (``passes.preset``), or None."""
    alias: bool = False
    """Whether V is the first ``v_head_dim`` elements of K's rows and has no memory of its own (MLA)."""
    keep_first: int = 0
    """Tokens at the start of a request that are never quantised."""
    keep_last: int = 0
    """At least so many last tokens of a request are not quantised yet."""

    def quant(self, field: str) -> QuantSpec:
        """The storage of ``"k"`` or ``"v"``."""
        return self.k if field == "k" else self.v

    def label(self, field: str) -> str:
        """How ``"k"`` or ``"v"`` is stored, for the heading of a kernel: ``int4 as 'head d/4 tok d%4'``."""
        if field == "v" and self.alias:
            return "inside K"
        own = self.quant(field)
        name = " + ".join(f"{size} {part.format}" for size, part in own.segments) or own.format
        return f"{name} as '{own.layout}'" if own.layout else name

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the buffers: one ``kv``, or ``k`` and ``v`` where the layout has no ``kv`` axis."""
        if "kv" in self.layout.dims():
            return ("kv",)
        return ("k",) if self.alias else ("k", "v")

    @property
    def fields(self) -> tuple[str, ...]:
        """What has memory: ``k`` and, unless it is a part of K, ``v``."""
        return ("k",) if self.alias else ("k", "v")

    @property
    def raw(self) -> RawSpec | None:
        """Which tokens of a request are left unquantised; None where every token is quantised at once."""
        sides = [self.quant(field) for field in self.fields]
        block = lcm(*(q.tok_block for side in sides for q in _stored(side) if q.spans))
        if not (self.keep_first or self.keep_last or block > 1):
            return None
        return RawSpec(self.keep_first, self.keep_last, block, self.page_size)

    def axes(self, field: str) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """Axes outside and inside the record of ``field``, outermost first.

        With a ``kv`` axis the record stands at its place. Without one, the record is a page of
        the field's own pool: it stands right of ``page``, so that a page stays one block.
        """
        own = self.quant(field).layout
        outer, inner = self.layout.split()
        if own is not None:
            inner = own.axes
        if "kv" not in self.layout.dims():
            at = [axis.dim for axis in inner].index("page") + 1
            outer, inner = inner[:at], inner[at:]
        return outer, inner


def scale_axes(quant: QuantSpec, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Those of ``axes`` along which the scales of ``quant`` differ.

    Blocks of d, and blocks of tokens, stand where the outermost axis of their dimension stands.
    """
    kept: list[Axis] = []
    blocks = {dim: block for dim, block in quant.group if block > 1 or dim == "d"}
    for axis in axes:
        block = blocks.get(axis.dim)
        if block is None:
            if axis.dim == "page" or (axis.dim in quant.scale_dims and axis.dim != "d"):
                kept.append(axis)
        elif not any(axis.dim == other.dim for other in kept):
            kept.append(Axis(axis.dim, "outer", block) if block > 1 else Axis(axis.dim))
    return tuple(kept)


def _stored(quant: QuantSpec) -> tuple[QuantSpec, ...]:
    return tuple(own for _, own in quant.segments) or (quant,)
