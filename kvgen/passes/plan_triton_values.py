"""Stored codes as numbers: for each run of d that a codec holds, its tiles of bytes and their operands.

Nothing here knows a codec by its name; its facts decide how bits become a number:

``integer``  the bits, sign-extended (two's complement), or less half their range (offset), or as they are
             (affine).
``float``    the bits moved to where f16 has them are a power of two below the value, denormals included.
``table``    a tree of selections, one a level.

Bytes hold n codes, n-ths of a row, so that each bit field of a tile of bytes is an operand ("lane") of
adjacent elements. Lanes are cut so that each lies within one block of d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvgen.ir import QuantSpec, Segment
from kvgen.passes.plan_triton_parts import DPart, split_d

E8M0_NAN = 255
E4M3_NAN = 0x7F


@dataclass(frozen=True)
class ValueLane:
    """One operand."""

    tag: str
    """Ends its name: ``k0_1_TD``."""
    part: DPart
    """Its elements, counted in the segment's."""
    element: int
    """Its first element of the row."""
    block: str
    """Number of its block of d; empty where a row has one scale."""

    @property
    def index(self) -> str:
        """Its elements of the row."""
        span = f"tl.arange(0, {self.part.width})"
        return f"{self.element} + {span}" if self.element else span

    @property
    def end(self) -> int:
        """The element of the row past its last."""
        return self.element + self.part.valid


@dataclass(frozen=True)
class ValueTile:
    """Stored elements loaded at once, and their operands, from the low bits upwards."""

    part: DPart
    lanes: tuple[ValueLane, ...]


@dataclass(frozen=True)
class ValueSegment:
    """A run of d in planes of its own."""

    plane: str
    quant: QuantSpec
    tiles: tuple[ValueTile, ...]
    blocks: tuple[tuple[str, int], ...]
    """Blocks of d with a scale of their own: number, first element; one, of no number, for a whole row."""
    site: str
    """Where scales enter: ``none``, ``given`` (one factor), ``column`` (one a key, or one a key and block of
    d) or ``tile`` (one an element)."""
    eighth: int
    """Bytes of the plane of top bits in a row, 0 without one."""

    @property
    def lanes(self) -> Iterator[ValueLane]:
        """All operands."""
        return (lane for tile in self.tiles for lane in tile.lanes)

    def of_block(self, block: str) -> list[ValueLane]:
        """The operands of one block."""
        return [lane for lane in self.lanes if lane.block == block]

    @property
    def helper(self) -> str:
        """Name of the function that makes numbers of bytes; empty where elements are numbers."""
        return f"{self.plane}_numbers" if self.quant.fmt.scaled else ""


def value_segment(segment: Segment, tag: str, cut: int = 0) -> ValueSegment:
    """The tiles of one segment; ``tag`` starts the names of its operands, no lane crosses element ``cut``."""
    quant, size = segment.quant, segment.size
    lanes = quant.planes[0].packed
    stored, block = size // lanes, quant.d_block
    site = "none"
    if quant.fmt.scaled:
        site = "given" if quant.static_scale else "tile" if quant.d_block == 1 else "column"
    blocked = site == "column" and block is not None
    edges = set(range(0, size, block)) if blocked and block else {0}
    edges |= {cut - segment.start} if segment.start < cut < segment.start + size else set()
    ends = {edge - i * stored for edge in edges for i in range(lanes)} | {stored}
    ends = {end for end in ends if 0 < end <= stored}
    parts, first = [], 0
    for end in sorted(ends):
        parts += [replace(part, start=first + part.start) for part in split_d(end - first)]
        first = end
    tiles = []
    for number, part in enumerate(parts):
        own = f"{tag}{number if len(parts) > 1 else ''}"
        found = []
        for i in range(lanes):
            start = part.start + i * stored
            of = str(start // block) if blocked and block else ""
            lane_tag = f"{own}_{i}" if lanes > 1 else own
            found.append(ValueLane(lane_tag, replace(part, start=start), segment.start + start, of))
        tiles.append(ValueTile(replace(part, tag=own), tuple(found)))
    blocks = tuple((str(i), i * block) for i in range(size // block)) if blocked and block else (("", 0),)
    eighth = size // 8 if len(quant.planes) > 1 else 0
    return ValueSegment(segment.plane, quant, tuple(tiles), blocks, site, eighth)


def number_lines(quant: QuantSpec, kind: str) -> tuple[str, ...]:
    """The body of a function of ``x`` (bytes) and, for codes of two planes, ``top``: numbers of every lane.

    ``kind`` is the type of the numbers, ``tl.float32`` or ``tl.float16``; both hold them exactly but for the
    levels of tables.
    """
    fmt, plane = quant.fmt, quant.planes[0]
    bits, mask = plane.bits, (1 << plane.bits) - 1
    lines, names = ["x = x.to(tl.int16)"], []
    for i in range(plane.packed):
        name = f"n{i}"
        names.append(name)
        code = f"(x >> {bits * i}) & {mask}" if i else f"x & {mask}"
        if len(quant.planes) > 1:
            code = f"({code}) | (((top >> {i}) & 1) << {bits})"
        signed = fmt.kind == "integer" and not quant.affine
        if signed and not fmt.offset:
            code = f"(x << {16 - bits * (i + 1)}) >> {16 - bits}"
        elif signed:
            code = f"({code}) - {1 << (fmt.bits - 1)}"
        if fmt.kind == "integer":
            lines.append(f"{name} = ({code}).to({kind})")
        elif fmt.kind == "float":
            lines += _float_lines(quant, name, code, kind)
        else:
            lines += [f"{name} = {code}", f"{name} = {_select(fmt.levels, name)}"]
            if kind != "tl.float32":
                lines.append(f"{name} = {name}.to({kind})")
    return (*lines, f"return {', '.join(names)}")


def _float_lines(quant: QuantSpec, name: str, code: str, kind: str) -> list[str]:
    fmt = quant.fmt
    sign, up = 1 << (fmt.bits - 1), 10 - fmt.mantissa
    place = f"(({name} & {sign}) << {16 - fmt.bits}) | (({name} & {sign - 1}) << {up})"
    lines = [f"{name} = {code}"]
    if fmt.special == "nan" and quant.static_scale:
        place = f"tl.where(({name} & {sign - 1}) == {sign - 1}, 0x7E00, {place}).to(tl.int16)"
    lines.append(f"{name} = ({place}).to(tl.float16, bitcast=True)")
    factor = 2.0 ** (15 - fmt.bias)
    scaled = f"{name} * {factor}" if factor != 1 else name
    wide = f"{name}.to({kind}) * {factor}" if factor != 1 else f"{name}.to({kind})"
    lines.append(f"{name} = {scaled if kind == 'tl.float16' else wide}")
    return lines


def _select(levels: tuple[float, ...], code: str, first: int = 0) -> str:
    """A balanced tree of selections by ``code``."""
    if len(levels) == 1:
        return repr(levels[0])
    half = 1 << ((len(levels) - 1).bit_length() - 1)
    low, high = _select(levels[:half], code, first), _select(levels[half:], code, first + half)
    return f"tl.where({code} < {first + half}, {low}, {high})"


def scale_text(dtype: str, loaded: str, bf16: str) -> str:
    """A stored scale or minimum of ``dtype`` as f32; ``bf16`` is the format that widens one of those."""
    if dtype == "e8m0":
        return f"e8m0_to_f32({loaded})"
    if dtype == "e4m3":
        return f"e4m3_scale_to_f32({loaded})"
    return {"f32": "{}", "bf16": bf16, "f16": "{}.to(tl.float32)"}[dtype].format(loaded)
