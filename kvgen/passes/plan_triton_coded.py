"""plan the tiles in which an append makes codes: rows of a segment, cut so that codes that share a byte, and
elements that share a scale, are axes of a reshape.

A tile is [R, F]. Its F elements are ``lanes`` runs of ``wide``, of which ``run`` exist: those that lie in the
same bits of a byte. Blocks that share a scale are [R, blocks, F / blocks] of it. Both are reshapes because a
block is a part of a run, or several runs. Powers of two throughout; what does not exist is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.errors import UnsupportedError
from kvgen.ir import Segment, Spec
from kvgen.ir.quant import CodePlane


@dataclass(frozen=True)
class CodedTile:
    """How the elements of a segment lie in a tile's second axis."""

    size: int
    """Elements of the segment."""
    block: int
    """Elements that share a scale."""
    lanes: int
    """Runs: codes of a byte."""
    wide: int
    """Elements of a run, those that do not exist included."""
    piece: int
    """Elements of a block within a run (of a whole run where a block is several), padding included."""

    @property
    def width(self) -> int:
        """Elements of the tile, F."""
        return self.lanes * self.wide

    @property
    def run(self) -> int:
        """Elements of a run that exist."""
        return self.size // self.lanes

    @property
    def part(self) -> int:
        """Elements of a piece that exist."""
        return min(self.block, self.run)

    @property
    def blocks(self) -> int:
        """Blocks of the tile, those that do not exist included."""
        return self.width // self.piece if self.block < self.run else self.size // self.block

    @property
    def padded(self) -> bool:
        """Whether some elements do not exist."""
        return self.wide != self.run

    def element(self, at: str) -> str:
        """The element of the segment at place ``at`` of the tile."""
        lane = self.in_run(self._within(at))
        return f"{at} // {self.wide} * {self.run} + {lane}" if self.lanes > 1 and self.padded else lane

    def exists(self, at: str) -> str:
        """Whether there is one at that place; empty where there is everywhere."""
        within = self._within(at)
        found = []
        if self.part != self.piece:
            found.append(f"({within} % {self.piece} < {self.part})")
        if self.wide // self.piece != self.run // self.part:
            found.append(f"({within} // {self.piece} < {self.run // self.part})")
        return " & ".join(found) if self.padded else ""

    def first(self, at: str) -> str:
        """The first element of block ``at``."""
        many = self.wide // self.piece
        if self.block >= self.run or many * self.block == self.run:
            return f"{at} * {self.block}" if self.block > 1 else at
        step = f"{at} % {many} * {self.block}" if self.block > 1 else f"{at} % {many}"
        return f"{at} // {many} * {self.run} + {step}" if self.lanes > 1 else step

    def has_block(self, at: str) -> str:
        """Whether block ``at`` exists; empty where all do."""
        many = self.wide // self.piece
        if self.block >= self.run or many * self.block == self.run:
            return ""
        return f"({at} % {many} < {self.run // self.block})"

    def in_run(self, at: str) -> str:
        """Place ``at`` of a run without the padding of its pieces."""
        if self.piece in (self.part, self.wide):
            return at
        return f"{at} // {self.piece} * {self.part} + {at} % {self.piece}"

    def bytes_of(self, plane: CodePlane) -> Packing:
        """How the codes of the tile become the bytes of a plane."""
        return Packing(self, plane)

    def _within(self, at: str) -> str:
        if self.lanes == 1:
            return at
        return f"{at} % {self.wide}" if self.padded else at


@dataclass(frozen=True)
class Packing:
    """Codes [R, F] to bytes [R, F / packed] of one plane."""

    tile: CodedTile
    plane: CodePlane

    @property
    def width(self) -> int:
        """Bytes, those that do not exist included."""
        return self.tile.width // self.plane.packed

    def byte(self, at: str) -> str:
        """The byte of the row at place ``at``."""
        tile = self.tile
        if not tile.padded:
            return at
        if self.width == tile.wide:
            return tile.in_run(at)
        return f"{at} // {tile.wide} * {tile.run} + {tile.in_run(f'({at} % {tile.wide})')}"

    def exists(self, at: str) -> str:
        """Whether there is one; empty where there is everywhere."""
        within = at if self.width == self.tile.wide else f"({at} % {self.tile.wide})"
        one = CodedTile(self.tile.run, self.tile.part, 1, self.tile.wide, self.tile.piece)
        return one.exists(within)

    @property
    def shifts(self) -> str:
        """Bits by which the codes of a byte move, over their number ``at_N``."""
        if self.plane.packed == 8:  # eighths, of which two make a fourth: see QuantSpec.planes
            return "(at_N >> 1) + 4 * (at_N & 1)"
        return f"at_N * {self.plane.bits}" if self.plane.bits > 1 else "at_N"


def coded_tile(part: Segment) -> CodedTile:
    """The tile of a segment. Raises UnsupportedError where a block is neither a part of a run nor several."""
    quant, size = part.quant, part.size
    lanes = max((plane.packed for plane in quant.planes), default=1) if quant.fmt.scaled else 1
    block = (quant.d_block or size) if quant.stored_scale else size
    run = size // lanes
    if run % block and block % run:
        raise UnsupportedError(
            f"cache.{part.plane[0]}.group.d = {block}: codes of {quant.format} share bytes in runs of {run} "
            f"of {size} elements, and a block must be a part of a run, or several; leave d out, or {run}"
        )
    if block >= run:
        wide = _power(run)
        return CodedTile(size, block, lanes, wide, wide)
    piece = _power(block)
    return CodedTile(size, block, lanes, _power(run // block) * piece, piece)


def coded(spec: Spec) -> bool:
    """Whether an append makes codes tile by tile, rather than lane by lane as the direct formats do."""
    return not all(spec.direct(side) for side in spec.cache.fields)


def _power(n: int) -> int:
    """The smallest power of two of at least ``n``."""
    return 1 << (n - 1).bit_length()
