"""Tiles of K and V as a kernel loads them, the operands each becomes, and the elements of d those hold.

A tile is a run of stored elements (codes, or bytes of two codes). An operand ("lane") is what meets q or the
weights in one dot. Where a row has several scales, a lane lies within one block of d.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvgen.ir import Spec
from kvgen.passes.plan_triton_codec import INT8_WIDTH, Reader
from kvgen.passes.plan_triton_parts import MIN_WIDTH, DPart, split_d


@dataclass(frozen=True)
class Lane:
    """One operand of one tile."""

    tag: str
    """Ends its name: ``k0_low_TD`` has the tag ``0_low``."""
    shift: int
    """Elements of d from the index of its byte to its own: half a row for high nibbles."""
    step: str
    """Text after the index of its word that makes that of its byte: `` * 2``, `` * 2 + 1``, or nothing."""
    block: str
    """Number of its block of d, which names its scale; empty where a row has one scale."""
    paired: bool = False
    """Whether it is the even or odd elements of a tile of elements, split when it is loaded."""


@dataclass(frozen=True)
class Tile:
    """Stored elements loaded at once, and their operands."""

    part: DPart
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Out:
    """A run of output elements."""

    tag: str
    index: str
    """Text of its elements of d, [1, width]."""
    part: DPart
    """Bounds it: an element exists where that of ``part`` does."""
    value: str
    """Text of the accumulated product."""


@dataclass(frozen=True)
class Side:
    """K or V of one kernel."""

    tiles: tuple[Tile, ...]
    blocks: tuple[str, ...]
    """Blocks of d with a scale of their own, in order; ``("",)`` for one scale a row."""

    @property
    def parts(self) -> tuple[DPart, ...]:
        """What is loaded."""
        return tuple(tile.part for tile in self.tiles)

    @property
    def lanes(self) -> tuple[tuple[Tile, Lane], ...]:
        """Every operand with its tile."""
        return tuple((tile, lane) for tile in self.tiles for lane in tile.lanes)

    def head(self, size: int) -> Side:
        """The tiles of the first ``size`` elements: V where it is a part of K."""
        tiles = tuple(tile for tile in self.tiles if tile.part.start < size)
        held = {lane.block for tile in tiles for lane in tile.lanes}
        return Side(tiles, tuple(block for block in self.blocks if block in held))

    def of_block(self, block: str) -> tuple[tuple[Tile, Lane], ...]:
        """The operands of one block."""
        return tuple((tile, lane) for tile, lane in self.lanes if lane.block == block)


def side(
    spec: Spec, name: str, size: int, reader: Reader, *, int8: bool, cuts: Sequence[int] = (), paired: int = 0
) -> Side:
    """The tiles of ``k`` or ``v`` with ``size`` elements a row; ``int8``: they are operands of int8 dots.

    No tile reaches across a place in ``cuts`` (stored elements). Tiles of the first ``paired`` elements fall
    apart into even and odd ones.
    """
    quant = spec.cache.quant(name)
    packed, block = quant.fmt.packed, quant.d_block
    stored = size // packed
    narrowest = INT8_WIDTH if int8 or reader.word > 1 or paired else MIN_WIDTH
    parts = _parts([*cuts, *range(block or stored, stored, block or stored), stored], narrowest)
    halves = packed > 1
    tiles = []
    for part in parts:
        lanes = []
        if part.start < paired:
            lanes = [
                Lane(part.tag + s, 0, step, "", True) for s, step in (("_even", " * 2"), ("_odd", " * 2 + 1"))
            ]
        for suffix in reader.lanes if part.start >= paired else ():
            shift = stored if halves and "high" in suffix else 0
            of = "" if block is None else str((part.start + shift) // block)
            step = "" if reader.word == 1 else " * 2 + 1" if "odd" in suffix else " * 2"
            lanes.append(Lane(part.tag + suffix, shift, step, of))
        tiles.append(Tile(part, tuple(lanes)))
    blocks = ("",) if block is None else tuple(str(i) for i in range(size // block))
    return Side(tuple(tiles), blocks)


def outputs(v: Side, reader: Reader) -> tuple[Out, ...]:
    """The output rows of a kernel, put together from the accumulators of V's lanes."""
    found = []
    for tile in v.tiles:
        part = tile.part
        runs: dict[str, list[Lane]] = {}
        for suffix, lane in zip(reader.lanes, tile.lanes, strict=True):
            half = next((name for name in ("_low", "_high") if name in suffix), "")
            runs.setdefault(half, []).append(lane)
        for half, lanes in runs.items():
            accs = [f"acc{lane.tag}_MD" for lane in lanes]
            value = accs[0] if len(accs) == 1 else f"tl.interleave({', '.join(accs)})"
            index = f"v_d{part.tag}_D[None, :]" + (f" + {lanes[0].shift}" if lanes[0].shift else "")
            found.append(Out(part.tag + half, index, part, value))
    return tuple(found)


def _parts(ends: Iterable[int], narrowest: int) -> tuple[DPart, ...]:
    """d-parts of the runs that end at ``ends``."""
    found: list[DPart] = []
    first = 0
    for end in sorted(set(ends)):
        found += [replace(part, start=first + part.start) for part in split_d(end - first, narrowest)]
        first = end
    if len(found) == 1:
        return (replace(found[0], tag=""),)
    return tuple(replace(part, tag=str(i)) for i, part in enumerate(found))
