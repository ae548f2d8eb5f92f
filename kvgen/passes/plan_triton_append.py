"""plan an append that makes codes tile by tile: every storage but the direct formats, and raw rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2
from typing import Any

from kvgen.ir import PageRecord, Schedule, Segment, Spec, Target
from kvgen.ir.plan import Constant, Fact
from kvgen.ir.quant import ZERO_BLOCK_AMAX, CodePlane
from kvgen.passes.plan_triton_coded import CodedTile, Packing, coded_tile
from kvgen.passes.plan_triton_encode import Encoder, ScaleType, encoder_of, scale_type
from kvgen.passes.plan_triton_hadamard import hadamard_text
from kvgen.passes.plan_triton_turn import Turn, turn_constants, turn_of
from kvgen.passes.plan_triton_types import POINTER, needs_casts, store_text, widen_text


@dataclass(frozen=True)
class PlaneBytes(Packing):
    """One plane of a segment's codes."""

    below: int
    """Bits of a code that lie in the planes before it."""
    cut: int
    """Mask of its own bits; 0 where nothing lies above them."""

    @property
    def suffix(self) -> str:
        """Of the plane's name."""
        return self.plane.suffix

    @property
    def type(self) -> str:
        """Triton's type of a stored byte."""
        return "tl.int8" if POINTER[self.plane.storage] == "*i8" else "tl.uint8"


@dataclass(frozen=True)
class CodedPart:
    """One segment of K or V, as an append writes it."""

    segment: Segment
    side: str
    tile: CodedTile
    rows: int
    """Rows of the tile, a power of two."""
    step: int
    """Tokens of it that exist, where rows are tokens of one request."""
    encoder: Encoder | None
    turn: Turn | None
    rotate: str
    """The rotated tile, as text; empty where it is not rotated."""
    mean: bool
    stored: str
    """The tile in the type of a plain format, as text."""
    raw_stored: str
    """The tile rounded to the query's type, as text."""
    raw_widen: str
    """Such numbers as f32, as a format."""
    protects: bool
    """Whether tokens at the start of a request take no part."""

    @property
    def plane(self) -> str:
        """Name of its first plane."""
        return self.segment.plane

    @property
    def scaled(self) -> bool:
        """Whether elements are codes."""
        return self.segment.quant.fmt.scaled

    @property
    def static(self) -> bool:
        """Whether its scale is given."""
        return self.segment.quant.static_scale

    @property
    def per_head(self) -> bool:
        """Whether a given scale differs by head."""
        return "head" in self.segment.quant.scale_dims

    @property
    def blocked(self) -> bool:
        """Whether blocks have scales of their own, which an append finds."""
        return self.segment.quant.stored_scale

    @property
    def affine(self) -> bool:
        """Whether a minimum lies beside the scale."""
        return self.segment.quant.affine

    @property
    def spans(self) -> bool:
        """Whether the tile's tokens share scales."""
        return self.segment.quant.spans

    @property
    def counted(self) -> bool:
        """Whether some tokens of a tile that shares scales have no say in them."""
        return self.spans and (self.protects or self.step != self.rows)

    @property
    def outer(self) -> bool:
        """Whether a given scale multiplies the stored ones."""
        return self.segment.quant.outer is not None

    @property
    def outer_per_head(self) -> bool:
        """Whether that scale differs by head."""
        return "head" in (self.segment.quant.outer or ())

    @property
    def scale_dtype(self) -> str:
        """Type of a stored scale."""
        return self.segment.quant.scale_dtype

    @property
    def power(self) -> bool:
        """Whether a scale is a power of two, its exponent stored."""
        return self.scale_dtype == "e8m0"

    @property
    def qmax_exponent(self) -> int:
        """Exponent of the largest code."""
        return floor(log2(self.segment.quant.fmt.qmax or 1.0))

    @property
    def steps(self) -> float:
        """What a block's measure is divided by."""
        return float(self.segment.quant.steps)

    @property
    def rms(self) -> bool:
        """Whether a block's measure is its root mean square."""
        return self.segment.quant.fmt.measure == "rms"

    @property
    def number(self) -> float:
        """Elements that share a scale."""
        return float(self.tile.block * max(1, self.segment.quant.tok_block))

    @property
    def d(self) -> str:
        """Element of the row at each place of the tile."""
        start = self.segment.start
        element = self.tile.element(f"{self.plane}_f_F")
        return f"{start} + {element}" if start else element

    @property
    def exists(self) -> str:
        """Whether there is one; empty where there is everywhere."""
        return self.tile.exists(f"{self.plane}_f_F")

    @property
    def packings(self) -> tuple[PlaneBytes, ...]:
        """Its planes of codes."""
        found: list[PlaneBytes] = []
        planes: tuple[CodePlane, ...] = self.segment.quant.planes
        for i, plane in enumerate(planes):
            cut = (1 << plane.bits) - 1 if i < len(planes) - 1 else 0
            found.append(PlaneBytes(self.tile, plane, sum(p.bits for p in planes[:i]), cut))
        return tuple(found)

    @property
    def words(self) -> str:
        """What the section of the source is about."""
        part = self.segment
        whole = f"elements {part.start} to {part.start + part.size - 1}"
        return f"{self.side.upper()}, {whole}: {part.quant.format}"


def coded_append(
    spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str
) -> tuple[dict[str, Any], tuple[Constant, ...], tuple[Fact, ...]]:
    """Answers, constants and facts of such an append."""
    raw, att = spec.cache.raw, spec.attention
    rows = schedule.int("rows")
    span = (raw.block if raw.block > 1 else rows) if raw else 0
    rope = att.rope if att.rope is not None and att.rope.stored == "post" else None
    parts = []
    for side in spec.cache.fields:
        quant = spec.cache.quant(side)
        for segment in spec.segments(side):
            step = segment.quant.tok_block if segment.quant.spans else rows
            if raw and not segment.quant.spans:
                step = min(rows, span & -span)
            tile, plane = coded_tile(segment), segment.plane
            turns = rope is not None and side == "k" and segment.start < rope.dim
            whole = rope is not None and segment.start + segment.size <= rope.dim and not tile.padded
            parts.append(
                CodedPart(
                    segment=segment,
                    side=side,
                    tile=tile,
                    rows=1 << (step - 1).bit_length(),
                    step=step,
                    encoder=encoder_of(segment.quant) if segment.quant.fmt.scaled else None,
                    turn=turn_of(rope, f"{plane}_d_F", whole) if rope is not None and turns else None,
                    rotate=hadamard_text(f"{plane}_RF", segment.size) if quant.transform else "",
                    mean=quant.mean and side == "k",
                    stored="" if segment.quant.fmt.scaled
                    else store_text(f"{plane}_RF", segment.quant.fmt.storage, target),
                    raw_stored=store_text(f"{plane}_RF", att.q_dtype, target),
                    raw_widen=widen_text(att.q_dtype, "f32", target),
                    protects=raw is not None and raw.keep_first > 0,
                )
            )  # fmt: skip
    constants = [
        Constant("PAGE", spec.cache.page_size, "tokens of a page"),
        *([] if raw else [Constant("KV_HEADS", att.kv_heads, "KV heads")]),
        *([] if raw else [Constant("ROWS", rows, "rows (token, KV head) of a program")]),
    ]
    if raw:
        constants += [
            Constant("SPAN", span, "tokens of a program"),
            Constant("BLOCK", raw.block, "tokens that are quantised together"),
            Constant("KEEP_LAST", raw.keep_last, "last tokens that stay raw"),
        ]
        if raw.keep_first:
            constants.append(Constant("KEEP_FIRST", raw.keep_first, "first tokens that stay raw"))
    if spec.cache.k.mean:
        constants.append(Constant("HEAD_DIM", att.head_dim, "elements of a key"))
    if any(p.blocked for p in parts):
        constants.append(
            Constant("ZERO_AMAX", ZERO_BLOCK_AMAX, "2**-100: a block below it is stored as zeros")
        )
    if rope:
        constants += turn_constants(rope, {p.plane: p.turn for p in parts if p.turn})
    encoders, scale_types = helpers(parts)
    types = [t for p in parts if not p.scaled for t in (p.segment.quant.format,)]
    types += [variant] + ([att.q_dtype] if raw else [])
    keys = "keys" if spec.cache.alias else "keys and values"
    who = "tokens of one request" if raw else "rows (token, KV head)"
    answers = {
        "coded": True,
        "least_warps": max((_warps(p) for p in parts), default=1),
        "title": f"append: store new {keys} "
        + ("of requests, quantised or raw." if raw else "as codes at their slots."),
        "lines": [
            f"One program stores {'SPAN' if raw else 'ROWS'} {who}."
            + (" Blocks that are old enough are quantised." if raw else " Slot -1 is skipped.")
        ],
        "parts": tuple(parts),
        "encoders": encoders,
        "scale_types": scale_types,
        "rotated": any(p.rotate for p in parts),
        "turned": any(p.turn for p in parts),
        "raw": raw is not None,
        "span": span,
        "keep_first": raw is not None and raw.keep_first > 0,
        "head": "head" if raw else "head_R",
        "head_is_row": raw is None,
        "bf16_casts_used": needs_casts(target, *types),
        "widen": widen_text(variant, "f32", target),
    }
    fact = Fact("no FMA contraction", "codes must equal the oracle's, byte by byte")
    return answers, tuple(constants), (fact,)


def _warps(part: CodedPart) -> int:
    """Warps that a tile of tokens that share scales needs to lie in registers: 32 numbers for each thread."""
    # At most 8: with 255 registers a thread, more would not fit a multiprocessor.
    return max(1, min(8, part.rows * part.tile.width // 1024)) if part.spans else 1


def helpers(parts: list[CodedPart]) -> tuple[tuple[Encoder, ...], tuple[ScaleType, ...]]:
    """The functions that the segments call, each once: those of scales that are small floats first."""
    dtypes = dict.fromkeys(p.scale_dtype for p in parts if p.blocked and not p.power)
    clamped = {p.scale_dtype for p in parts if p.blocked and p.outer}
    scales = tuple(scale_type(dtype, dtype in clamped) for dtype in dtypes)
    found = [s.encoder for s in scales if s.encoder] + [p.encoder for p in parts if p.encoder]
    return tuple(dict.fromkeys(found)), scales
