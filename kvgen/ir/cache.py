"""CacheSpec: how K and V lie in memory, page by page."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir.layout import Axis, LayoutSpec
from kvgen.ir.quant import QuantSpec

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

    def quant(self, field: str) -> QuantSpec:
        """The storage of ``"k"`` or ``"v"``."""
        return self.k if field == "k" else self.v

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

    def scale_axes(self, field: str, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Those of ``axes`` along which the scales of ``field`` differ.

        Blocks of d stand where the field's outermost d axis stands.
        """
        quant, kept = self.quant(field), []
        block = quant.d_block
        for axis in axes:
            if axis.dim == "d":
                if block is not None:
                    kept.append(Axis("d", "outer", block))
                    block = None
            elif axis.dim == "page" or axis.dim in quant.scale_dims:
                kept.append(axis)
        return tuple(kept)

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
