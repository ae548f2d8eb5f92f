"""plan append, merge, copy and gather for Triton: ops without a loop over keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import e, log2, prod
from typing import Any

from kvgen.ir import PageRecord, Plane, Schedule, Spec, Target
from kvgen.ir.plan import Arg, Constant, Fact
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.passes.lower import fold_site, lower_addresses
from kvgen.passes.plan_triton_append import coded_append
from kvgen.passes.plan_triton_codec import Reader, row_codec
from kvgen.passes.plan_triton_coded import coded
from kvgen.passes.plan_triton_gather import coded_gather
from kvgen.passes.plan_triton_pages import block_step
from kvgen.passes.plan_triton_parts import Entry, params, split_d
from kvgen.passes.plan_triton_tiles import Lane, Side, Tile, side
from kvgen.passes.plan_triton_turn import turn_constants, turns_of
from kvgen.passes.plan_triton_types import needs_casts, store_text, widen_text

LOG2_E = log2(e)  # natural units to base 2

Answers = tuple[dict[str, Any], tuple[Constant, ...], tuple[Fact, ...]]


@dataclass(frozen=True)
class RowSide:
    """How K or V is written or read, row by row."""

    name: str
    """``k`` or ``v``."""
    tiles: tuple[Tile, ...]
    blocks: tuple[RowBlock, ...]
    """What shares a scale: blocks of d, or the whole row."""
    format: str
    scaled: bool
    static: bool
    """Whether the scale is given (per head or for all) rather than computed per row."""
    per_head: bool
    verbatim: bool
    """Whether an append stores its input as it is, and a gather returns what it reads."""
    turned: bool
    """Whether an append rotates it."""
    reader: Reader

    @property
    def qmax(self) -> str:
        """Name of the constant that holds its largest code."""
        return f"{self.name.upper()}_QMAX"


@dataclass(frozen=True)
class RowBlock:
    """Elements of a row that share a scale."""

    tag: str
    lanes: tuple[Lane, ...]
    step: str
    """Text from the row's first scale to its own."""


@dataclass(frozen=True)
class Run:
    """One plane of one page as runs of adjacent elements."""

    plane: str
    elements: int
    """Elements of the plane in one page."""
    offset: str
    """Offset of element ``e_E`` from the page's start, as text."""
    page_stride: str


def row_answers(
    op: str,
    spec: Spec,
    record: PageRecord,
    schedule: Schedule,
    target: Target,
    variant: str,
    args: tuple[Arg, ...],
) -> Answers:
    """Answers, constants and facts of an op that is not attention."""
    coding = coded(spec)
    build = {
        "append": coded_append if coding else _append,
        "merge": _merge,
        "copy": _copy,
        "gather": coded_gather if coding else _gather,
    }[op]
    answers, constants, facts = build(spec, record, schedule, target, variant)
    # Bytes of an append and of a gather must equal the oracle's: no a*b+c in one rounding there.
    fusion = op == "merge"
    host_only = {
        "append": {"batch", "max_new_len", "table_width"},
        "copy": {"num_pairs"},
        "gather": {"batch", "max_kv_len"},
    }.get(op, set())
    named = [a.name for a in args if a.name not in host_only]
    warps = max(schedule.int("num_warps"), answers.get("least_warps", 1))
    entry = Entry(op, params(args, named), warps, 3, fusion)
    return {**answers, "kernels": (entry,)}, constants, facts


def _stored(spec: Spec, name: str) -> Side:
    """The tiles of ``k`` or ``v`` as they are stored."""
    codec, att = row_codec(spec), spec.attention
    size, reader = (att.head_dim, codec.k) if name == "k" else (att.v_head_dim, codec.v)
    return side(spec, name, size, reader, int8=False)


def _sides(spec: Spec, record: PageRecord, variant: str, *, turned: bool = False) -> tuple[RowSide, ...]:
    """K and V (a V that is a part of K is not stored); ``turned``: K is rotated on the way."""
    codec, addresses = row_codec(spec), lower_addresses(spec, record)
    sides = []
    for name in spec.cache.fields:
        quant, reader = spec.cache.quant(name), codec.k if name == "k" else codec.v
        found, turns = _stored(spec, name), turned and name == "k"
        block, scales = quant.d_block or 0, addresses.get(f"{name}_scale")
        sides.append(
            RowSide(
                name=name,
                tiles=found.tiles,
                blocks=tuple(
                    RowBlock(
                        tag,
                        tuple(lane for _, lane in found.of_block(tag)),
                        block_step(scales, i * block) if scales else "",
                    )
                    for i, tag in enumerate(found.blocks)
                ),
                format=quant.format,
                scaled=quant.fmt.scaled,
                static=quant.static_scale,
                per_head=fold_site(spec, name).per_head,
                verbatim=quant.fmt.storage == variant and not turns,
                turned=turns,
                reader=reader,
            )
        )
    return tuple(sides)


def _append(spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str) -> Answers:
    rope = spec.attention.rope
    if rope is not None and rope.stored != "post":
        rope = None  # its keys are rotated when they are read
    turns = turns_of(rope, _stored(spec, "k")) if rope else {}
    sides = _sides(spec, record, variant, turned=rope is not None)
    quantising = any(s.scaled for s in sides)
    constants = [
        Constant("KV_HEADS", spec.attention.kv_heads, "KV heads"),
        Constant("PAGE", spec.cache.page_size, "tokens of a page"),
        Constant("ROWS", schedule.int("rows"), "rows (token, KV head) of a program"),
    ]
    constants += [
        Constant(s.qmax, float(spec.cache.quant(s.name).fmt.qmax or 0), f"largest code of {s.name.upper()}")
        for s in sides
        if s.scaled and not (s.static and s.format == "e4m3")
    ]
    if any(s.scaled and not s.static for s in sides):
        constants.append(
            Constant("ZERO_AMAX", ZERO_BLOCK_AMAX, "2**-100: a row below this is stored as zeros")
        )
    if rope:
        constants += turn_constants(rope, turns)
    casts = needs_casts(target, *(t for s in sides if not s.verbatim for t in (s.format, variant)))
    rows = "keys" if spec.cache.alias else "keys and values"
    ways = (["keys rotated"] if rope else []) + (["quantised"] if quantising else [])
    on_the_way = f", {' and '.join(ways)} on the way" if ways else ""
    answers = {
        "coded": False,
        "title": f"append: store new {rows} at their slots{on_the_way}.",
        "sides": sides,
        "turns": turns,
        "bf16_casts_used": casts,
        "widen": widen_text(variant, "f32", target),
        "formats": {s.format for s in sides},
        "stored": {s.name: partial(store_text, dtype=s.format, target=target) for s in sides},
    }
    return (
        answers,
        tuple(constants),
        (Fact("no FMA contraction", "codes must equal the oracle's, byte by byte"),),
    )


def _merge(spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str) -> Answers:
    att = spec.attention
    parts = split_d(att.v_head_dim)
    constants: tuple[Constant, ...] = (
        Constant("Q_HEADS", att.q_heads, "query heads"),
        Constant("ROWS", schedule.int("rows"), "rows (token, query head) of a program"),
    )
    if any(part.padded for part in parts):
        constants += (Constant("V_HEAD_DIM", att.v_head_dim, "elements of an output row"),)
    if att.sink:
        constants += (Constant("LOG2_E", LOG2_E, "from natural units to base 2"),)
    answers = {
        "sink": att.sink,
        "v_parts": parts,
        "bf16_casts_used": needs_casts(target, variant),
        "to_out": partial(store_text, dtype=variant, target=target),
        "widen": widen_text(variant, "f32", target),
    }
    return answers, constants, ()


def _gather(spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str) -> Answers:
    sides = _sides(spec, record, variant)
    constants = (
        Constant("PAGE", spec.cache.page_size, "tokens of a page"),
        Constant("TILE", schedule.int("tile"), "tokens of a program"),
    )
    rows = "keys (values are a part of them)" if spec.cache.alias else "keys and values"
    answers = {
        "coded": False,
        "title": f"gather: the {rows} of each request, contiguous and dequantised to {variant}.",
        "sides": sides,
        "codec": row_codec(spec),
        "rescues_e4m3": False,
        "widens": False,
        "wild": False,
        "bf16_casts_used": needs_casts(
            target, *(t for s in sides if not s.verbatim for t in (s.format, variant))
        ),
        "widen": {
            s.name: "{}" if s.verbatim else widen_text(s.reader.kind or s.format, "f32", target)
            for s in sides
        },
        "to_out": partial(store_text, dtype=variant, target=target),
    }
    return answers, constants, ()


def _copy(spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str) -> Answers:
    runs, constants, facts = (
        [],
        [Constant("BLOCK", schedule.int("block"), "stored elements of a plane that one program copies")],
        [],
    )
    for plane in record.planes:
        run, found, adjacent = _runs(plane)
        runs.append(run)
        constants += found
        facts.append(Fact(f"{plane.name} is copied in runs of {adjacent} elements", "its dense inner axes"))
    answers = {"runs": tuple(runs), "largest": max(run.elements for run in runs)}
    return answers, tuple(constants), tuple(facts)


def _runs(plane: Plane) -> tuple[Run, list[Constant], int]:
    """An element's number within a page as digits, dense axes joined; padding is never touched."""
    name = plane.name.upper()
    inside = sorted(plane.inside, key=lambda a: a.stride.fixed)
    run = 1
    rest: list[tuple[int, int, str]] = []
    for axis in inside:
        extent, stride = axis.extent or 1, axis.stride.fixed // plane.itemsize
        if stride == run and not rest:
            run *= extent
        elif extent > 1:
            rest.append((extent, stride, f"{name}_STRIDE_{axis.axis.key.upper()}"))
    constants = [Constant(label, stride, plane.unit) for _, stride, label in rest]
    digits = [(extent, label) for extent, _, label in rest]
    # Axes left of page have run-time strides, so they are 64-bit digits.
    digits += [(a.extent or 1, f"{plane.name}_stride_{a.axis.key}") for a in plane.outside]
    if digits:
        constants.insert(0, Constant(f"{name}_RUN", run, f"adjacent {plane.unit}"))
    terms = [f"e_E % {name}_RUN" if digits else "e_E"]
    above = f"e_E // {name}_RUN"
    for at, (extent, label) in enumerate(digits):
        terms.append(f"({above}) * {label}" if at == len(digits) - 1 else f"({above} % {extent}) * {label}")
        above += f" // {extent}"
    elements = run * prod(extent for extent, _ in digits)
    return Run(plane.name, elements, " + ".join(terms), f"{plane.name}_stride_page"), constants, run
