"""plan a gather that reads code by code: every storage but the direct formats, and raw rows.

Each element looks up its own byte, which the elements that share it load once more from the nearest cache: a
gather is bound by the rows that it writes, which are up to eight times as long as those it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from kvgen.ir import PageRecord, Schedule, Segment, Spec, Target
from kvgen.ir.codec import CODECS, Codec
from kvgen.ir.plan import Constant, Fact
from kvgen.passes.plan_triton_hadamard import hadamard_text, to_f32
from kvgen.passes.plan_triton_types import needs_casts, store_text, widen_text

FLOAT_SCALE = "e4m3"
"""The type of scales that is a small float."""


@dataclass(frozen=True)
class Decoder:
    """One function from codes to numbers."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class PlaneOf:
    """Where a plane holds an element's bits; texts are formats of the element."""

    name: str
    byte: str
    shift: str
    mask: int


@dataclass(frozen=True)
class GatheredPart:
    """One segment of K or V, as a gather reads it."""

    segment: Segment
    side: str
    decoder: Decoder | None
    rotate: str
    """The tile rotated back, as text; empty where it is not rotated."""
    mean: bool
    scale_text: str
    """A stored scale as f32, as a format."""
    widen: str
    """An element of a plain format as f32, as a format."""

    @property
    def plane(self) -> str:
        """Name of its first plane."""
        return self.segment.plane

    @property
    def size(self) -> int:
        """Elements that exist."""
        return self.segment.size

    @property
    def width(self) -> int:
        """Elements of the tile, a power of two."""
        return 1 << (self.size - 1).bit_length()

    @property
    def padded(self) -> bool:
        """Whether some elements do not exist."""
        return self.width != self.size

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
    def outer(self) -> bool:
        """Whether a given scale multiplies the stored ones."""
        return self.segment.quant.outer is not None

    @property
    def outer_per_head(self) -> bool:
        """Whether that scale differs by head."""
        return "head" in (self.segment.quant.outer or ())

    @property
    def affine(self) -> bool:
        """Whether a minimum is added."""
        return self.segment.quant.affine

    @property
    def columns(self) -> tuple[str, ...]:
        """Planes of numbers beside the codes."""
        return ("scale", "min") if self.affine else ("scale",)

    @property
    def element(self) -> str:
        """The elements of the row."""
        at = f"{self.plane}_e_D"
        return f"{self.segment.start} + {at}" if self.segment.start else at

    @property
    def planes(self) -> tuple[PlaneOf, ...]:
        """Its planes of codes: see QuantSpec.planes."""
        found, size = [], self.size
        for name, plane in self.segment.codes:
            run, mask = size // plane.packed, (1 << plane.bits) - 1
            if plane.packed == 1:
                found.append(PlaneOf(name, "{0}", "", mask))
            elif plane.packed == 8:
                shift = f"{{0}} // {size // 4} + {{0}} // {run} % 2 * 4"
                found.append(PlaneOf(name, f"{{0}} % {run}", shift, mask))
            else:
                found.append(PlaneOf(name, f"{{0}} % {run}", f"{{0}} // {run} * {plane.bits}", mask))
        return tuple(found)

    @property
    def code(self) -> str:
        """The whole codes, as text."""
        low, *top = [f"{plane.name}_TD" for plane in self.planes]
        return f"{low} | ({top[0]} << {self.segment.quant.planes[0].bits})" if top else low

    @property
    def words(self) -> str:
        """What the section of the source is about."""
        last = self.segment.start + self.size - 1
        quant = self.segment.quant
        return f"{self.side.upper()}, elements {self.segment.start} to {last}: {quant.format}"


def coded_gather(
    spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str
) -> tuple[dict[str, Any], tuple[Constant, ...], tuple[Fact, ...]]:
    """Answers, constants and facts of such a gather."""
    raw, att = spec.cache.raw, spec.attention
    constants = [
        Constant("PAGE", spec.cache.page_size, "tokens of a page"),
        Constant("TILE", schedule.int("tile"), "tokens of a program"),
    ]
    if raw:
        constants.append(Constant("BLOCK", raw.block, "tokens that are quantised together"))
        constants.append(Constant("KEEP_LAST", raw.keep_last, "last tokens that stay raw"))
        if raw.keep_first:
            constants.append(Constant("KEEP_FIRST", raw.keep_first, "first tokens that stay raw"))
    if spec.cache.k.mean:
        constants.append(Constant("HEAD_DIM", att.head_dim, "elements of a key"))
    parts = []
    for side in spec.cache.fields:
        quant = spec.cache.quant(side)
        for segment in spec.segments(side):
            own = segment.quant
            parts.append(
                GatheredPart(
                    segment,
                    side,
                    _decoder(own.fmt, own.affine) if own.fmt.scaled else None,
                    hadamard_text(f"{segment.plane}_TD", segment.size) if quant.transform else "",
                    quant.mean and side == "k",
                    _scale_text(own.scale_dtype, target),
                    widen_text(own.fmt.storage, "f32", target) if not own.fmt.scaled else "",
                )
            )
    dtypes = {p.segment.quant.scale_dtype for p in parts if p.scaled and not p.static}
    decoders = [p.decoder for p in parts if p.decoder]
    if FLOAT_SCALE in dtypes:
        decoders.insert(0, _decoder(CODECS[FLOAT_SCALE], False))
    plain = [p.segment.quant.format for p in parts if not p.scaled]
    types = [variant, *dtypes, *plain, *([att.q_dtype] if raw else [])]
    rows = "keys (values are a part of them)" if spec.cache.alias else "keys and values"
    answers = {
        "coded": True,
        "title": f"gather: the {rows} of each request, contiguous and dequantised to {variant}.",
        "parts": tuple(parts),
        "decoders": tuple(dict.fromkeys(decoders)),
        "scale_types": dtypes,
        "rotated": any(p.rotate for p in parts),
        "raw": raw is not None,
        "keep_first": raw is not None and raw.keep_first > 0,
        "raw_widen": widen_text(att.q_dtype, "f32", target),
        "bf16_casts_used": needs_casts(target, *types),
        "to_out": partial(store_text, dtype=variant, target=target),
    }
    return answers, tuple(constants), ()


def _decoder(fmt: Codec, affine: bool) -> Decoder:
    half = 1 << (fmt.bits - 1)
    if fmt.kind == "float":
        place = f"((code & {half}) << {16 - fmt.bits}) | ((code & {half - 1}) << {10 - fmt.mantissa})"
        lines = [f"bits = {place}"]
        if fmt.special == "nan":
            lines.append(f"bits = tl.where((code & {half - 1}) == {half - 1}, 0x7E00, bits)")
        value = "bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)"
        lines.append(f"return {value} * {2.0 ** (15 - fmt.bias)!r}")
        return Decoder(f"number_of_e{fmt.exponent}m{fmt.mantissa}", tuple(lines))
    if fmt.kind == "table":
        levels = [to_f32(level) for level in fmt.levels]
        lines = [f"x = tl.where(code <= {len(levels) - 2}, {levels[-2]!r}, {levels[-1]!r})"]
        lines += [f"x = tl.where(code <= {i}, {levels[i]!r}, x)" for i in range(len(levels) - 3, -1, -1)]
        return Decoder(f"level_of_{len(levels)}_{fmt.name}", (*lines, "return x"))
    if affine:
        return Decoder("step_of", ("return code.to(tl.float32)",))
    value = f"code - {half}" if fmt.offset else f"(code ^ {half}) - {half}"
    return Decoder(f"number_of_int{fmt.bits}", (f"return ({value}).to(tl.float32)",))


def _scale_text(dtype: str, target: Target) -> str:
    """A stored scale or minimum as f32, as a format."""
    if dtype == "e8m0":
        return "e8m0_to_f32({})"
    if dtype == FLOAT_SCALE:
        return f"{_decoder(CODECS[FLOAT_SCALE], False).name}({{}}.to(tl.int32))"
    return widen_text(dtype, "f32", target)
