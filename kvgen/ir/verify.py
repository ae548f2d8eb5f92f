"""verify: proves, in plain integers, what a page record promises. It trusts nothing ``place`` computed.

For every pool of N >= 1 pages, with all byte counts linear in N (``Extent``):

1. the planes are those the spec asks for, with its axes, extents and types;
2. planes start on ``align`` in every record, and every address is a multiple of its element;
3. the pitch of rows and of pages follows the rule of ``row_stride``, restated here;
4. no two elements share a byte, within a plane or between planes; all lie inside their pool.

Point 4 is two lemmas. *Nesting*: with axes sorted by stride, if every stride is at least the span
of all smaller ones, positions are digits of a mixed-radix number, so distinct indices are
distinct bytes. *Peeling*: two planes whose byte intervals are disjoint are disjoint; otherwise they must
have the same largest axis (dim, extent, stride), and one step of it must cover both remainders together:
then different steps cannot meet, equal steps leave the remainders, which are compared in the same way.

It lies with the nouns because an exported package takes it along: there nothing else tells a record that was
altered from the one that its kernels were compiled for.
"""

from __future__ import annotations

from itertools import combinations

from kvgen.errors import KvgenError
from kvgen.ir import Axis, CacheSpec, Extent, PageRecord, Plane, Spec
from kvgen.ir.cache import scale_axes
from kvgen.ir.quant import DTYPE_BYTES
from kvgen.ir.record import PlaneAxis


class VerifyError(KvgenError, AssertionError):
    """A record that breaks a promise: a fault of kvgen (or of a hand-made record), not of the user."""


def verify_record(spec: Spec, record: PageRecord) -> None:
    """Raise ``VerifyError`` naming the plane unless ``record`` keeps every promise for ``spec``."""
    _check(record.align == spec.cache.align, "record", f"align {record.align} is not the spec's")
    expected = _expected(spec)
    names = tuple(plane.name for plane in record.planes)
    _check(sorted(names) == sorted(expected), "record", f"planes {names}, expected {tuple(expected)}")
    pools = dict(record.pools)
    wanted = dict.fromkeys(_pool(spec.cache, name) for name in expected)
    _check(sorted(pools) == sorted(wanted), "record", f"pools {tuple(pools)}, expected {tuple(wanted)}")
    for name, size in record.pools:
        _check(
            _aligned(size, record.align), name, f"pool of {size} bytes does not end on align {record.align}"
        )
    for plane in record.planes:
        _check(plane.pool == _pool(spec.cache, plane.name), plane.name, f"lies in {plane.pool}")
        _check_axes(spec, plane, *expected[plane.name])
        inline = spec.cache.quant(plane.name[0]).scales == "inline"
        _check_starts(spec.cache, plane, inline)
        if not inline:  # else rows of several planes share a pitch, which point 4 shows to be enough
            _check_pitches(spec.cache, plane)
        _check_nesting(plane)
        end = plane.offset + _span(_ordered(plane), plane.itemsize)
        _check(
            _at_least(pools[plane.pool], end),
            plane.name,
            f"ends at {end}, past its pool's {pools[plane.pool]}",
        )
    for a, b in combinations(record.planes, 2):
        if a.pool == b.pool:
            _check_apart(a, b)
    _check_raw(spec, record)


def _check_raw(spec: Spec, record: PageRecord) -> None:
    """Raw rows of a page: all heads and tokens of a side behind one another, each side on ``align``."""
    att, cache = spec.attention, spec.cache
    widths = {"k": att.head_dim, "v": att.v_head_dim}
    wanted = [f"{field}_raw" for field in cache.fields] if cache.raw else []
    names = [plane.name for plane in record.raw]
    _check(names == wanted, "record", f"raw planes {names}, expected {wanted}")
    for plane in record.raw:
        _check(plane.pool == "raw", plane.name, f"lies in {plane.pool}")
        axes = tuple(map(Axis, ("page", "head", "tok", "d")))
        _check_axes(spec, plane, att.q_dtype, axes, widths[plane.name[0]])
        _check(
            plane.axes[-1].stride == Extent(plane.itemsize), plane.name, "has rows that are not contiguous"
        )
        fits = _aligned(plane.offset, cache.align) and _aligned(plane.page.stride, cache.align)
        _check(fits, plane.name, f"does not start on {cache.align}")
        _check(plane.page.stride == record.raw[0].page.stride, plane.name, "has a pitch of its own")
        _check_nesting(plane)
    for a, b in combinations(record.raw, 2):
        _check_apart(a, b)


def smallest_pitch(row_bytes: int, align: int) -> int:
    """The rule of semantics.md, by search: smallest s >= row_bytes with s % align == 0 or align % s == 0."""
    whole_lines = -(-row_bytes // align) * align
    parts = [1 << bit for bit in range(align.bit_length()) if 1 << bit >= row_bytes]
    return min([whole_lines, *parts])


def _expected(spec: Spec) -> dict[str, tuple[str, tuple[Axis, ...], int]]:
    """Plane name -> (dtype, axes outermost first, elements of d) that the spec asks for."""
    found: dict[str, tuple[str, tuple[Axis, ...], int]] = {}
    for field in spec.cache.fields:
        outer, inner = spec.cache.axes(field)
        for part in spec.segments(field):
            quant = part.quant
            for name, plane in part.codes:
                found[name] = (plane.storage, outer + inner, part.size // plane.packed)
            if quant.fmt.scaled and any(dim == "tok" for dim, _ in quant.group):
                axes = scale_axes(quant, outer + inner)
                for kind in ("scale", "min") if quant.affine else ("scale",):
                    found[f"{part.plane}_{kind}"] = (quant.scale_dtype, axes, part.size)
    return found


def _pool(cache: CacheSpec, name: str) -> str:
    """The buffer in which a plane belongs."""
    pool = "kv" if "kv" in cache.layout.dims() else name[0]
    apart = name.endswith(("_scale", "_min")) and cache.quant(name[0]).scales == "pool"
    return f"{pool}_scale" if apart else pool


def _check_axes(spec: Spec, plane: Plane, dtype: str, axes: tuple[Axis, ...], width: int) -> None:
    att = spec.attention
    sizes = {"head": att.kv_heads, "tok": spec.cache.page_size, "d": width}
    _check(plane.dtype == dtype, plane.name, f"holds {plane.dtype}, expected {dtype}")
    got = tuple(a.axis for a in plane.axes)
    _check(
        got == axes, plane.name, f"has axes {' '.join(map(str, got))}, expected {' '.join(map(str, axes))}"
    )
    at = [axis.dim for axis in axes].index("page")
    for depth, a in enumerate(plane.axes):
        grows = bool(a.stride.per_page)
        want = None if a.axis.dim == "page" else a.axis.extent(sizes[a.axis.dim])
        _check(a.extent == want, plane.name, f"has {a.extent} steps of {a.axis}, expected {want}")
        _check(
            a.constant == (depth > at), plane.name, f"calls the stride of {a.axis} constant = {a.constant}"
        )
        _check(
            depth < at or not grows, plane.name, f"steps {a.axis} by {a.stride}, which grows with the pool"
        )


def _check_starts(cache: CacheSpec, plane: Plane, inline: bool) -> None:
    """Planes start on align in every record (the first one of a row does); elements on their own size."""
    size = DTYPE_BYTES[plane.dtype]
    outer, _ = cache.axes(plane.name[0])
    starts = _aligned(plane.offset, cache.align) or (inline and plane.name != plane.name[0])
    _check(starts, plane.name, f"starts at {plane.offset}, not on {cache.align}")
    _check(
        _aligned(plane.offset, size), plane.name, f"starts at {plane.offset}, not on its {size}-byte elements"
    )
    for a in plane.axes:
        unit = max(cache.align, size) if a.axis in outer else size
        _check(
            _aligned(a.stride, unit), plane.name, f"steps {a.axis} by {a.stride}, not a multiple of {unit}"
        )


def _check_pitches(cache: CacheSpec, plane: Plane) -> None:
    """The innermost axis within a record is a contiguous row; its pitch and the page's follow the rule."""
    outer, _ = cache.axes(plane.name[0])
    own = [a for a in plane.axes if a.axis not in outer]
    if not own:  # one scale a record: no row
        return
    row = own[-1]
    contiguous = row.extent is None or row.stride == Extent(plane.itemsize)
    _check(contiguous, plane.name, f"has rows along {row.axis} with elements {row.stride} bytes apart")
    for inner, above in zip(own[::-1], own[-2::-1], strict=False):
        if inner.extent is None or inner.stride.per_page:
            continue  # steps of page and beyond: nesting is all that is promised
        # Above the row, blocks follow one another without padding, up to a page.
        tight = inner.extent * inner.stride.fixed
        pitched = smallest_pitch(tight, cache.align) if inner is row or above.extent is None else tight
        _check(
            above.stride.fixed == pitched,
            plane.name,
            f"steps {above.axis} by {above.stride}, expected {pitched} for {tight} bytes",
        )


def _check_nesting(plane: Plane) -> None:
    axes = _ordered(plane)
    for depth, a in enumerate(axes):
        inner = _span(axes[depth + 1 :], plane.itemsize)
        _check(
            _at_least(a.stride, inner), plane.name, f"steps {a.axis} by {a.stride}, inside a span of {inner}"
        )


def _check_apart(a: Plane, b: Plane) -> None:
    left, right = _ordered(a), _ordered(b)
    both = f"{a.name} and {b.name}"
    while True:
        spans = (a.offset + _span(left, a.itemsize), b.offset + _span(right, b.itemsize))
        if _at_least(b.offset, spans[0]) or _at_least(a.offset, spans[1]):
            return
        _check(bool(left and right), both, "overlap")
        x, y = left.pop(0), right.pop(0)
        same = (x.axis.dim, x.extent, x.stride) == (y.axis.dim, y.extent, y.stride)
        _check(same, both, f"overlap: they step {x.axis} by {x.stride} and {y.axis} by {y.stride}")
        low = a.offset if _at_least(b.offset, a.offset) else b.offset
        for offset, axes, size in ((a.offset, left, a.itemsize), (b.offset, right, b.itemsize)):
            reach = offset + _span(axes, size)
            _check(_at_least(low + x.stride, reach), both, f"overlap: one step of {x.axis} is {x.stride}")


def _ordered(plane: Plane) -> list[PlaneAxis]:
    """Axes that move at all, largest stride first (for large N), whatever order the record lists them in."""
    moving = [a for a in plane.axes if a.extent != 1]
    return sorted(moving, key=lambda a: (a.stride.per_page, a.stride.fixed), reverse=True)


def _span(axes: list[PlaneAxis], itemsize: int) -> Extent:
    """Bytes from the first to past the last element over ``axes``."""
    total = Extent(itemsize)
    for a in axes:
        # N - 1 steps of a constant stride s are s * N - s; _check_axes made sure that it is constant.
        steps = Extent(-a.stride.fixed, a.stride.fixed) if a.extent is None else a.stride.times(a.extent - 1)
        total = total + steps
    return total


def _at_least(a: Extent, b: Extent) -> bool:
    """Whether a >= b for every N >= 1: a linear function is, if it does not fall and starts right."""
    return a.per_page >= b.per_page and a.at(1) >= b.at(1)


def _aligned(size: Extent, unit: int) -> bool:
    return size.fixed % unit == 0 and size.per_page % unit == 0


def _check(holds: bool, plane: str, reason: str) -> None:
    if not holds:
        raise VerifyError(f"plane {plane}: {reason}")
