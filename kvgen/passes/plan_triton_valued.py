"""plan decode and prefill of codecs without operands of their own: codes become numbers as they are read.

Where scales enter ("fold site"): a scale of a key (and of a block of d) multiplies its column of scores, or
its weight; its minimum adds ``min * sum(q)`` to the score, and ``weight * min`` to one number of each output
row. A scale that differs by element of d and is shared by tokens multiplies the tile. Keys are multiplied in
the query's type where codes are exact in it, else as tf32, which has the range of f32: no units.

Raw tokens stand beside codes in masked loops alone: each tile chooses by token, raw keys with a scale of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import Arg, Constant, Fact
from kvgen.passes.address import Address
from kvgen.passes.plan_triton_codec import Codec, Reader
from kvgen.passes.plan_triton_hadamard import hadamard_text
from kvgen.passes.plan_triton_kernels import (
    entries,
    head_of_row,
    ignored,
    kernel_constants,
    live_rows,
    loads_of_edges,
    row_tile,
    summary,
)
from kvgen.passes.plan_triton_mask import Mask, segments
from kvgen.passes.plan_triton_pages import Lookup, View, lookup_for
from kvgen.passes.plan_triton_parts import DPart, aligned, split_d
from kvgen.passes.plan_triton_raw import check_valued, raw_lines, raw_mask
from kvgen.passes.plan_triton_rules import rules_for
from kvgen.passes.plan_triton_types import Dot, common, store_text, widen_text
from kvgen.passes.plan_triton_values import ValueLane, ValueSegment, number_lines, scale_text, value_segment


@dataclass(frozen=True)
class ValueOut:
    """A run of output elements, as ``Out``."""

    tag: str
    index: str
    mask: str
    value: str


@dataclass(frozen=True)
class ValueSide:
    """K or V of one kernel."""

    name: str
    segments: tuple[ValueSegment, ...]
    dots: Mapping[str, Dot]
    """How each segment, by its plane, is multiplied."""
    raw: str
    """Text around a raw tile that makes f32 of it; empty where no token is raw."""

    @property
    def lanes(self) -> tuple[tuple[ValueSegment, ValueLane], ...]:
        """Every operand with its segment."""
        return tuple((seg, lane) for seg in self.segments for lane in seg.lanes)


def valued_codec(spec: Spec, target: Target) -> Codec:
    """What the shared templates ask of a codec."""
    nvidia = target.arch.startswith("sm_")
    fp8 = nvidia and int(target.arch[3:]) >= 89
    q = "codes" if spec.attention.qk == "int8" else "plain"
    return Codec(q, 1, Reader(), Reader(), nvidia, fp8, False)


def valued_sides(spec: Spec, target: Target) -> dict[str, ValueSide]:
    """K and V; a V that is a part of K has K's tiles."""
    att, raw = spec.attention, spec.cache.raw
    widen = widen_text(att.q_dtype, "f32", target) if raw else ""
    cut = att.v_head_dim if spec.cache.alias else 0
    k = _segments(spec, "k", cut)
    v = _first(k, cut) if cut else _segments(spec, "v", 0)
    return {
        name: ValueSide(name, own, {seg.plane: _dot(spec, seg, name, target) for seg in own}, widen)
        for name, own in (("k", k), ("v", v))
    }


def _segments(spec: Spec, name: str, cut: int) -> tuple[ValueSegment, ...]:
    found = spec.segments(name)
    tags = [f"s{i}" if len(found) > 1 else "" for i in range(len(found))]
    return tuple(value_segment(part, tag, cut) for part, tag in zip(found, tags, strict=True))


def _first(segments: tuple[ValueSegment, ...], size: int) -> tuple[ValueSegment, ...]:
    """What lies in the first ``size`` elements."""
    found = []
    for seg in segments:
        tiles = (replace(t, lanes=tuple(x for x in t.lanes if x.element < size)) for t in seg.tiles)
        kept = tuple(tile for tile in tiles if tile.lanes)
        held = {lane.block for tile in kept for lane in tile.lanes}
        if kept:
            found.append(replace(seg, tiles=kept, blocks=tuple(b for b in seg.blocks if b[0] in held)))
    return tuple(found)


def _dot(spec: Spec, seg: ValueSegment, name: str, target: Target) -> Dot:
    q, fmt = spec.attention.q_dtype, seg.quant.fmt
    # A rotated query has more bits than the query's type.
    rotated = name == "k" and spec.cache.k.transform is not None and spec.attention.qk != "int8"
    # Codes above a minimum have a mean: a rotation gathers it, and the rounding of weights, in one element.
    rotated |= name == "v" and spec.cache.v.transform is not None and seg.quant.affine
    if not fmt.scaled:
        compute, precision = common(q, fmt.storage, target)
    elif q == "f32":
        compute, precision = common(q, "f32", target)
    elif seg.site == "tile" or fmt.kind == "table" or (name == "v" and q == "f16") or rotated:
        compute, precision = "f32", "tf32"
    else:
        compute, precision = q, ""
    have = fmt.storage if not fmt.scaled else "f32" if fmt.kind == "table" or seg.site == "tile" else "f16"
    if target.interpreted and compute == "bf16":
        left = "from_bf16(to_bf16({}))" if name == "v" else widen_text(q, "f32", target)
        return Dot("f32", "ieee", left, widen_text(have, "f32", target))
    left = "{}" if compute == "f32" else store_text("{}", compute, target).replace("({})", "{}")
    return Dot(compute, precision, left, widen_text(have, compute, target))


def valued_views(
    spec: Spec, record: PageRecord, addresses: Mapping[str, Address], sides: Mapping[str, ValueSide],
    lookup: Lookup, multiple: Mapping[str, int],
) -> dict[str, View]:  # fmt: skip
    """Pointers of every plane, raw rows included."""
    found: dict[str, View] = {}
    for name in spec.cache.fields:
        for seg in sides[name].segments:
            parts = tuple(tile.part for tile in seg.tiles)
            spread = tuple(replace(lane.part, tag=lane.tag) for lane in seg.lanes)
            for plane, _ in _codes(seg):
                found[plane] = View(plane, addresses[plane], lookup, parts, 1, multiple[plane])
            for plane in (f"{seg.plane}_scale", f"{seg.plane}_min"):
                if record.has(plane) and not seg.quant.static_scale:
                    own = spread if seg.site == "tile" else ()
                    found[plane] = View(plane, addresses[plane], lookup, own, 1, multiple[plane])
        if record.raw:
            plane = f"{name}_raw"
            own = tuple(
                DPart(lane.tag, lane.element, lane.part.width, lane.part.valid)
                for _, lane in sides[name].lanes
            )
            found[plane] = View(plane, addresses[plane], replace(lookup, ids=f"raw_{lookup.ids}"), own)
    return found


def _codes(seg: ValueSegment) -> tuple[tuple[str, str], ...]:
    return tuple((f"{seg.plane}{plane.suffix}", plane.suffix) for plane in seg.quant.planes)


def index_lines(sides: Mapping[str, ValueSide], views: Mapping[str, View]) -> tuple[str, ...]:
    """Definitions of the element indices that pointers use."""
    tops = {f"{seg.plane}_top": seg.eighth for side in sides.values() for seg in side.segments if seg.eighth}
    found = []
    for view in views.values():
        for part in view.parts:
            index = part.index()
            if view.name in tops:
                index = f"({index}) % {tops[view.name]}"
            found.append(f"{view.d(part)} = {index}")
    return tuple(found)


def valued_outs(v: ValueSide, spec: Spec, op: str) -> tuple[ValueOut, ...]:
    """What a kernel stores, as texts over its accumulators; rotated rows of a prefill are whole again."""
    found = []
    for seg, lane in v.lanes:
        value = f"acc{lane.tag}_MD"
        if seg.quant.affine and seg.site == "column":
            value = f"({value} + off_{seg.plane}{lane.block}_M[:, None])"
        index = f"({lane.index})[None, :]"
        there = f"({index} < {lane.end})" if lane.part.padded else ""
        found.append(ValueOut(lane.tag, index, there, value))
    return tuple(found)


def valued_answers(
    spec: Spec, record: PageRecord, target: Target, op: str, addresses: Mapping[str, Address],
    lookup: Lookup, mask: Mask, multiple: Mapping[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Answers that the templates of this way ask beside the shared ones."""
    att, sides = spec.attention, valued_sides(spec, target)
    views = valued_views(spec, record, addresses, sides, lookup, multiple)
    k, v = sides["k"], sides["v"]
    owned = [seg for name in spec.cache.fields for seg in sides[name].segments]
    stored = [seg for seg in owned if seg.quant.stored_scale]
    rotated = {name: spec.cache.quant(name).transform is not None for name in ("k", "v")}
    exact = "tf32x3" if not (target.interpreted or target.arch.startswith("gfx")) else "ieee"
    bf16 = widen_text("bf16", "f32", target)
    heads = {name: " + head" if per_head else "" for name, _, per_head in spec.given_scales()}
    wild_v = any(not seg.quant.fmt.scaled or seg.site in ("tile", "given") for seg in v.segments)
    return {
        "values": True,
        "sides": sides,
        "k_values": k,
        "v_values": v,
        "views": views,
        "index_lines": index_lines(sides, views),
        "number_segments": [seg for seg in owned if seg.helper],
        "number_lines": {
            seg.plane: number_lines(
                seg.quant, "tl.float32" if seg.quant.fmt.kind == "table" else "tl.float16"
            )
            for seg in owned
            if seg.helper
        },
        "scale_kinds": {seg.quant.scale_dtype for seg in stored},
        "scale_of": lambda seg, load: scale_text(seg.quant.scale_dtype, load, bf16),
        "given": heads,
        "raw_key": raw_lines(spec)[2],
        "rotated": rotated,
        "q_parts": split_d(att.head_dim),
        "q_widen": widen_text(att.q_dtype, "f32", target),
        "q_exact": exact if att.q_dtype == "f32" or target.interpreted else "tf32",
        "out_exact": exact,
        "q_store": {seg.plane: _q_text(k.dots[seg.plane], att.q_dtype, target) for seg in k.segments},
        "narrow": {
            name: {
                seg.plane: store_text("{}", side.dots[seg.plane].compute, target).replace("({})", "{}")
                for seg in side.segments
            }
            for name, side in sides.items()
        },
        "mean": spec.cache.k.mean,
        "norm": att.head_dim**-0.5,
        "v_norm": att.v_head_dim**-0.5,
        "unrotated": hadamard_text if rotated["v"] and op == "decode" else None,
        "wild": bool(mask.by_row) and (wild_v or spec.cache.raw is not None),
        "outs": valued_outs(v, spec, op),
        "affine_v": [
            (seg, block) for seg in v.segments for block, _ in seg.blocks
            if seg.quant.affine and seg.site == "column"
        ],
        "affine_k": [
            (seg, block) for seg in k.segments for block, _ in seg.blocks
            if seg.quant.affine and seg.site == "column"
        ],
        "widens": any(view.widens for view in views.values()),
    }  # fmt: skip


def valued_kernel(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str,
    addresses: dict[str, Address], args: tuple[Arg, ...],
) -> tuple[dict[str, Any], tuple[Constant, ...], tuple[Fact, ...]]:  # fmt: skip
    """Answers, constants and facts of ``decode`` or ``prefill``.

    Raises UnsupportedError for a schedule whose numbers do not fit each other, and for what has no kernel.
    """
    check_valued(spec)
    att = spec.attention
    ragged = op == "prefill" or variant != "single"
    tile, rows = schedule.int("tile"), row_tile(op, spec, schedule, ragged)
    live = live_rows(att.group, ragged, rows)
    rules = rules_for(op, spec, variant, foldable=False, live=bool(live))
    mask = raw_mask(rules.mask, spec)
    lines, more, _ = raw_lines(spec)
    lookup = lookup_for(spec.cache.page_size, tile, target, att.head_dim)
    codec = valued_codec(spec, target)
    promised = aligned(spec, record)
    multiple = {
        p.name: (16 if f"{p.name}_stride_page" in promised else 1) if codec.ptx else 0 for p in record.planes
    }
    own = valued_answers(spec, record, target, op, addresses, lookup, mask, multiple)
    read = rules.read
    answers: dict[str, Any] = rules.answers | own | {
        "mask": mask,
        "segments": segments(mask),
        "request_lines": (*lines, *rules.answers["request_lines"]),
        "coded": "coded_T" if spec.cache.raw else "seen_T",
        "codec": codec,
        "ragged": ragged,
        "rows": rows,
        "soft": "M",
        "fold_rows": False,
        "lookup": lookup,
        "ahead": False,
        "ignored": ignored(op, spec, ragged, rules, valued=True),
        "turning": None,
        "rescues_e4m3": False,
        "aliased": spec.cache.alias,
        "d_parts": split_d(att.v_head_dim),
        "head_dim": att.head_dim,
        "sum_late": op == "decode",
        "unroll": schedule.int("unroll") if op == "decode" and not mask.never_full else 1,
        "edges": loads_of_edges(op, spec, schedule, mask),
        "bf16_casts_used": target.interpreted and _holds_bf16(spec),
        "again": ragged and (att.group & (att.group - 1) != 0 or (op == "prefill" and rules.crowded)),
        "token_of_row": "row_M" if att.group == 1 else "row_M // GROUP",
        "head_of_row": head_of_row(att.group, ragged),
        "row_tiles": 1 if ragged else -(-att.group // rows),
        "live": live,
        "to_out": partial(store_text, dtype=att.q_dtype, target=target),
        "summary": summary(spec, op, rules.words),
        "kernels": entries(op, args, schedule, ragged, codec, read, rules.merged),
    }  # fmt: skip
    constants = (*kernel_constants(op, spec, schedule, target, answers, rules), *more)
    facts = (
        Fact(f"pages are looked up by {lookup.kind}", f"page {spec.cache.page_size}, tile {tile}"),
        *(
            Fact(
                f"{seg.plane}: scales enter at the {side.name} {_SITES[seg.site]}",
                f"{seg.quant.format}, dots in {side.dots[seg.plane].compute}",
            )
            for side in own["sides"].values()
            for seg in side.segments
            if seg.site != "none"
        ),
    )
    return answers, constants, facts


_SITES = {"given": "column", "column": "column", "tile": "tile"}


def _holds_bf16(spec: Spec) -> bool:
    found = {spec.attention.q_dtype}
    for name in spec.cache.fields:
        for part in spec.segments(name):
            found |= {part.quant.fmt.storage, part.quant.scale_dtype if part.quant.fmt.scaled else ""}
    return "bf16" in found


def _q_text(dot: Dot, q: str, target: Target) -> str:
    """Text around f32 elements of q that makes operands of them, rounded as the query's type is."""
    if dot.precision == "ieee" and q == "bf16" and target.interpreted:
        return "from_bf16(to_bf16({}))"
    return (
        "{}"
        if dot.compute == "f32"
        else f"{{}}.to({'tl.bfloat16' if dot.compute == 'bf16' else 'tl.float16'})"
    )
