"""place: CacheSpec + AttentionSpec -> PageRecord: offsets, strides, padding.

Built from the innermost axis outwards. Axes right of ``page`` get constant strides; ``page``
itself and axes left of it get strides that a launcher passes at run time, because they depend
on the size of the pool or on who owns the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.ir import Axis, CacheSpec, Extent, PageRecord, Plane, Spec
from kvgen.ir.cache import scale_axes
from kvgen.ir.quant import DTYPE_BYTES, QuantSpec, Segment
from kvgen.ir.record import PlaneAxis


@dataclass(frozen=True)
class _Component:
    """A plane before it has a place."""

    name: str
    dtype: str
    field: str
    axes: tuple[Axis, ...]
    """Inside the record, outermost first."""
    sizes: dict[str, int]
    scales: QuantSpec | None
    """Whose scales it holds, or None for codes."""


def place(spec: Spec) -> PageRecord:
    """The page record of a spec. ``kvgen.ir.verify`` proves what it promises."""
    cache = spec.cache
    if cache.preset is not None:
        raise ValueError(f"layout {cache.preset!r} depends on the target: resolve it first (passes.preset)")
    planes: list[Plane] = []
    pools: list[tuple[str, Extent]] = []
    for pool in cache.pools:
        fields = cache.fields if pool == "kv" else (pool,)
        parts = [part for field in fields for part in _components(spec, field)]
        apart = [part for part in parts if part.scales and cache.quant(part.field).scales == "pool"]
        for name, own in ((pool, [part for part in parts if part not in apart]), (f"{pool}_scale", apart)):
            if own:
                placed, size = _place_pool(spec, name, own)
                planes += placed
                pools.append((name, size))
    return PageRecord(tuple(planes), tuple(pools), cache.align, _raw_planes(spec))


def row_stride(row_bytes: int, align: int) -> int:
    """Smallest s >= row_bytes with s % align == 0 or align % s == 0 (bytes).

    A row then never straddles an aligned line needlessly, and rows shorter than a line are not
    padded to a whole one.
    """
    if row_bytes >= align:
        return -(-row_bytes // align) * align
    return 1 << (row_bytes - 1).bit_length()


def _components(spec: Spec, field: str) -> list[_Component]:
    """The planes of a field in memory order: of each segment its codes, then the scales that pages hold."""
    cache, found = spec.cache, []
    _, inner = cache.axes(field)
    sizes = {"head": spec.attention.kv_heads, "tok": cache.page_size}
    for part in spec.segments(field):
        quant = part.quant
        for name, plane in part.codes:
            found.append(
                _Component(name, plane.storage, field, inner, sizes | {"d": part.size // plane.packed}, None)
            )
        if quant.stored_scale:
            axes = scale_axes(quant, inner)
            found += [
                _Component(name, quant.scale_dtype, field, axes, sizes | {"d": part.size}, quant)
                for name in scale_names(part)
            ]
    return found


def scale_names(part: Segment) -> tuple[str, ...]:
    """The planes that hold the scales of a segment: ``k_scale``, and ``k_min`` where it is affine."""
    return (f"{part.plane}_scale", f"{part.plane}_min") if part.quant.affine else (f"{part.plane}_scale",)


def _place_pool(spec: Spec, pool: str, parts: list[_Component]) -> tuple[list[Plane], Extent]:
    """Planes of one buffer: the record's components one after another, then the outer axes."""
    cache = spec.cache
    outer, _ = cache.axes(parts[0].field)
    placed: list[tuple[_Component, tuple[PlaneAxis, ...], Extent]] = []
    cursor = Extent(0)
    for field in dict.fromkeys(part.field for part in parts):
        own = [part for part in parts if part.field == field]
        if cache.quant(field).scales == "inline" and any(part.scales for part in own):
            rows, size = _inline(cache, own)
            placed += [(part, inside, cursor + Extent(offset)) for part, inside, offset in rows]
            cursor = cursor + _align_up(size, cache.align)
            continue
        for part in own:
            inside, size = _stack(
                part.axes, part.sizes, Extent(DTYPE_BYTES[part.dtype]), cache.align, pad_rows=True
            )
            placed.append((part, inside, cursor))
            cursor = cursor + _align_up(size, max(cache.align, DTYPE_BYTES[part.dtype]))
    shared, total = _stack(outer, parts[0].sizes, cursor, cache.align, pad_rows=False)
    planes = []
    for part, inside, offset in placed:
        kept = shared
        if part.scales:  # d never stands outside a record
            own_axes = scale_axes(part.scales, tuple(a.axis for a in shared))
            kept = tuple(a for a in shared if a.axis in own_axes)
        axes = kept + inside
        at = [a.axis.dim for a in axes].index("page")
        marked = tuple(replace(a, constant=depth > at) for depth, a in enumerate(axes))
        planes.append(Plane(part.name, part.dtype, pool, offset, marked))
    return planes, total


def _inline(
    cache: CacheSpec, parts: list[_Component]
) -> tuple[list[tuple[_Component, tuple[PlaneAxis, ...], int]], Extent]:
    """Components whose rows lie behind one another, row after row, as (component, axes, bytes into a row)."""
    offsets, end = [], 0
    for part in parts:
        unit = DTYPE_BYTES[part.dtype]
        offsets.append(-(-end // unit) * unit)
        own = [axis for axis in part.axes if axis.dim == "d"]
        end = offsets[-1] + unit * (own[0].extent(part.sizes["d"]) if own else 1)
    unit = max(DTYPE_BYTES[part.dtype] for part in parts)
    pitch = row_stride(-(-end // unit) * unit, max(cache.align, unit))
    above = tuple(axis for axis in parts[0].axes if axis.dim != "d")
    steps, size = _stack(above, parts[0].sizes, Extent(pitch), cache.align, pad_rows=False)
    rows = []
    for part, offset in zip(parts, offsets, strict=True):
        own_axes = tuple(
            PlaneAxis(axis, axis.extent(part.sizes["d"]), Extent(DTYPE_BYTES[part.dtype]), False)
            for axis in part.axes
            if axis.dim == "d"
        )
        rows.append((part, steps + own_axes, offset))
    return rows, size


def _raw_planes(spec: Spec) -> tuple[Plane, ...]:
    """``k_raw`` and ``v_raw``: rows of a page's unquantised tokens, in the type of the query."""
    if spec.cache.raw is None:
        return ()
    att, cache, dtype = spec.attention, spec.cache, spec.attention.q_dtype
    widths = {"k": att.head_dim, "v": att.v_head_dim}
    axes = tuple(map(Axis, ("head", "tok", "d")))
    blocks, cursor = {}, 0
    for field in cache.fields:
        sizes = {"head": att.kv_heads, "tok": cache.page_size, "d": widths[field]}
        blocks[field] = cursor, _stack(axes, sizes, Extent(DTYPE_BYTES[dtype]), cache.align, pad_rows=True)
        cursor += _align_up(blocks[field][1][1], max(cache.align, 4)).fixed
    pitch = PlaneAxis(Axis("page"), None, Extent(cursor), False)
    return tuple(
        Plane(
            f"{field}_raw",
            dtype,
            "raw",
            Extent(start),
            (pitch, *(replace(axis, constant=True) for axis in inside)),
        )
        for field, (start, (inside, _)) in blocks.items()
    )


def _stack(
    axes: tuple[Axis, ...], sizes: dict[str, int], unit: Extent, align: int, *, pad_rows: bool
) -> tuple[tuple[PlaneAxis, ...], Extent]:
    """Strides of ``axes`` over blocks of ``unit`` bytes, and the bytes of the whole stack.

    With ``pad_rows`` the innermost axis is a row. The pitches of rows and of pages follow ``row_stride``:
    the next plane starts on ``align`` for every number of pages, so a page's padding costs nothing extra
    where ``page`` is outermost, and pages then start on lines of their own.
    """
    placed: list[PlaneAxis] = []
    for depth, axis in enumerate(reversed(axes)):
        if axis.dim == "page":
            pitch = row_stride(unit.fixed, align)
            placed.append(PlaneAxis(axis, None, Extent(pitch), False))
            unit = Extent(0, pitch)
            continue
        extent = axis.extent(sizes[axis.dim])
        placed.append(PlaneAxis(axis, extent, unit, False))
        unit = unit.times(extent)
        if depth == 0 and pad_rows:
            unit = Extent(row_stride(unit.fixed, align))
    return tuple(reversed(placed)), unit


def _align_up(size: Extent, align: int) -> Extent:
    return Extent(-(-size.fixed // align) * align, -(-size.per_page // align) * align)
