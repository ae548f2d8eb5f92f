"""place: CacheSpec + AttentionSpec -> PageRecord: offsets, strides, padding.

Built from the innermost axis outwards. Axes right of ``page`` get constant strides; ``page``
itself and axes left of it get strides that a launcher passes at run time, because they depend
on the size of the pool or on whoever owns the buffer.
"""

from __future__ import annotations

from dataclasses import replace

from kvgen.ir import Axis, CacheSpec, Extent, PageRecord, Plane, Spec
from kvgen.ir.quant import DTYPE_BYTES
from kvgen.ir.record import PlaneAxis


def place(spec: Spec) -> PageRecord:
    """The page record of a spec. ``passes.verify_record`` proves what it promises."""
    cache = spec.cache
    if cache.preset is not None:
        raise ValueError(f"layout {cache.preset!r} depends on the target: resolve it first (passes.preset)")
    sizes = {
        "k": {"head": spec.attention.kv_heads, "tok": cache.page_size, "d": spec.attention.head_dim},
        "v": {"head": spec.attention.kv_heads, "tok": cache.page_size, "d": spec.attention.v_head_dim},
    }
    planes: list[Plane] = []
    pools: list[tuple[str, Extent]] = []
    for pool in cache.pools:
        fields = cache.fields if pool == "kv" else (pool,)
        placed, size = _place_pool(cache, pool, fields, sizes)
        planes += placed
        pools.append((pool, size))
    return PageRecord(tuple(planes), tuple(pools), cache.align)


def row_stride(row_bytes: int, align: int) -> int:
    """Smallest s >= row_bytes with s % align == 0 or align % s == 0 (bytes).

    A row then never straddles an aligned line needlessly, and rows shorter than a line are not
    padded to a whole one.
    """
    if row_bytes >= align:
        return -(-row_bytes // align) * align
    return 1 << (row_bytes - 1).bit_length()


def _place_pool(
    cache: CacheSpec, pool: str, fields: tuple[str, ...], sizes: dict[str, dict[str, int]]
) -> tuple[list[Plane], Extent]:
    """Planes of one buffer: the record's components one after another, then the outer axes."""
    outer, _ = cache.axes(fields[0])
    components: list[tuple[str, str, tuple[PlaneAxis, ...], Extent]] = []
    cursor = Extent(0)
    for field in fields:
        _, inner = cache.axes(field)
        for name, dtype, axes in _components(cache, field, inner):
            steps = sizes[field]
            if name == field:  # d of a data plane counts stored elements
                steps = steps | {"d": steps["d"] // cache.quant(field).fmt.packed}
            inside, size = _stack(axes, steps, Extent(DTYPE_BYTES[dtype]), cache.align, pad_rows=True)
            size = _align_up(size, max(cache.align, DTYPE_BYTES[dtype]))
            components.append((name, dtype, inside, cursor))
            cursor = cursor + size
    shared, total = _stack(outer, sizes[fields[0]], cursor, cache.align, pad_rows=False)
    planes = []
    for name, dtype, inside, offset in components:
        placed = (_scale_axes(cache, name, shared) if name.endswith("_scale") else shared) + inside
        at = [a.axis.dim for a in placed].index("page")
        marked = tuple(replace(a, constant=depth > at) for depth, a in enumerate(placed))
        planes.append(Plane(name, dtype, pool, offset, marked))
    return planes, total


def _components(
    cache: CacheSpec, field: str, inner: tuple[Axis, ...]
) -> list[tuple[str, str, tuple[Axis, ...]]]:
    """(plane name, type, inner axes) of a field: its data, then its scales where a page holds them."""
    quant = cache.quant(field)
    found = [(field, quant.fmt.storage, inner)]
    if quant.fmt.scaled and not quant.static_scale:
        found.append((f"{field}_scale", quant.scale_dtype, cache.scale_axes(field, inner)))
    return found


def _scale_axes(cache: CacheSpec, name: str, axes: tuple[PlaneAxis, ...]) -> tuple[PlaneAxis, ...]:
    kept = cache.scale_axes(name[0], tuple(a.axis for a in axes))  # d never stands outside a record
    return tuple(a for a in axes if a.axis in kept)


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
