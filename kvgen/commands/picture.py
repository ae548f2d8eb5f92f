"""One page as an ASCII picture: which plane lies where, how large, and where the padding is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvgen.commands.output import grouped
from kvgen.ir import PageRecord, Plane
from kvgen.ir.record import PlaneAxis

WIDTH = 13
"""Characters inside a box."""


@dataclass(frozen=True)
class Block:
    """A stretch of a page that holds one plane's elements, or padding."""

    start: int
    size: int
    label: str
    note: str = ""


def page_picture(record: PageRecord) -> Iterator[str]:
    """The lines of the picture: one column of boxes for each stretch of memory that a page has."""
    for pool, _ in record.pools:
        planes = [plane for plane in record.planes if plane.pool == pool]
        # A plane whose start grows with the pool has its pages elsewhere: another stretch.
        for start in dict.fromkeys(plane.offset.per_page for plane in planes):
            yield from _stretch(pool, start, [p for p in planes if p.offset.per_page == start])


def _stretch(pool: str, start: int, planes: Sequence[Plane]) -> Iterator[str]:
    loops = {plane.name: _loops(plane) for plane in planes}
    outside = [a for a in planes[0].outside if a.extent != 1]
    pitch, shared = planes[0].page.stride.fixed, []
    # Steps that all planes take together: the picture shows one of them.
    while len(planes) > 1 and all(loops.values()) and len({_step(found[0]) for found in loops.values()}) == 1:
        shared.append(next(iter(loops.values()))[0])
        for found in loops.values():
            found.pop(0)
    limit = shared[-1].stride.fixed if shared else pitch
    where = f", from {grouped(start)} x num_pages" if start else ""
    yield f"pool {pool}{where}: a page is {grouped(pitch)} bytes" + "".join(
        f", one for each {a.axis} ({a.extent})" for a in outside
    )
    if shared:
        counts = " x ".join(f"{a.axis} {a.extent}" for a in shared)
        yield f"of which this is the first of {counts}, {grouped(limit)} bytes each"
    yield from _boxes(_with_padding(_blocks(planes, loops, shared, limit), limit), limit)
    if shared and (rest := pitch - shared[0].stride.fixed * (shared[0].extent or 1)):
        yield f"and {grouped(rest)} bytes of padding at the page's end"


def _loops(plane: Plane) -> list[PlaneAxis]:
    """The axes inside a page that do not continue a contiguous run, outermost first."""
    run, axes = plane.itemsize, [a for a in plane.inside if a.extent != 1]
    while axes and axes[-1].stride.fixed == run:
        run *= axes.pop().extent or 1
    return axes


def _step(placed: PlaneAxis) -> tuple[str, int | None, int]:
    return placed.axis.dim, placed.extent, placed.stride.fixed


def _blocks(
    planes: Sequence[Plane], loops: Mapping[str, list[PlaneAxis]], shared: Sequence[PlaneAxis], limit: int
) -> Iterator[Block]:
    """One block for each plane; the padding between its rows, and after the last one, belongs to it."""
    ordered = sorted(planes, key=lambda plane: plane.offset.fixed)
    ends = [*(plane.offset.fixed for plane in ordered[1:]), limit]
    for plane, end in zip(ordered, ends, strict=True):
        inside = [a for a in plane.inside if a not in shared]
        used = math.prod(a.extent for a in inside if a.extent is not None) * plane.itemsize
        outer = loops[plane.name][:1]
        size = (outer[0].extent or 1) * outer[0].stride.fixed if outer else used
        size = min(size, end - plane.offset.fixed)
        shape = " x ".join(f"{a.axis} {a.extent}" for a in inside if a.extent != 1) or "one"
        padding = f", {grouped(size - used)} of them padding" if used < size else ""
        note = f"{grouped(size)} bytes{padding}: {plane.dtype} {shape}"
        yield Block(plane.offset.fixed, size, plane.name, note)


def _with_padding(blocks: Iterable[Block], limit: int) -> Iterator[Block]:
    at = 0
    for block in blocks:
        if block.start > at:
            yield Block(at, block.start - at, "(padding)", f"{grouped(block.start - at)} bytes")
        yield block
        at = block.start + block.size
    if at < limit:
        yield Block(at, limit - at, "(padding)", f"{grouped(limit - at)} bytes")


def _boxes(blocks: Iterable[Block], limit: int) -> Iterator[str]:
    margin = len(grouped(limit))
    for block in blocks:
        fill = "." if block.label == "(padding)" else " "
        yield f"  {grouped(block.start):>{margin}} +{'-' * WIDTH}+"
        yield f"  {'':{margin}} | {block.label:<{WIDTH - 1}}| {block.note}"
        for _ in range(round(3 * block.size / limit)):
            yield f"  {'':{margin}} |{fill * WIDTH}|"
    yield f"  {grouped(limit):>{margin}} +{'-' * WIDTH}+"
