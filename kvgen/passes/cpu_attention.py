"""What decode and prefill ask the plan on the CPU: tiles, operands, fold sites, masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.errors import UnsupportedError
from kvgen.ir import PageRecord, Schedule, Spec, Target, rules
from kvgen.ir.plan import Constant, Part
from kvgen.passes.address import Address
from kvgen.passes.cpu_text import C_TYPES, from_f32, reading, to_f32, writing
from kvgen.passes.lower import FoldSite, fold_site
from kvgen.passes.masks import MaskTerm, mask_terms

LANES = {"avx512": 16, "avx2": 8, "portable": 4}
"""f32 lanes of a vector of each ISA row."""

REGISTER_TILE = {"avx512": 16, "avx2": 8, "portable": 8}
"""Accumulators that the inner kernels keep in registers."""


@dataclass(frozen=True)
class Inputs:
    """What the answers of one CPU kernel are made from."""

    spec: Spec
    record: PageRecord
    schedule: Schedule
    target: Target
    variant: str
    addresses: Mapping[str, Address]


Answers = tuple[tuple[Constant, ...], Mapping[str, Any]]
"""The constants of a kernel beside those of every op, and the answers to its template."""


def attention_answers(given: Inputs) -> Answers:
    """Constants and answers of the decode (variant ``single`` or ``multi``) and prefill templates."""
    spec, schedule, target, variant = given.spec, given.schedule, given.target, given.variant
    addresses = given.addresses
    att, page = spec.attention, spec.cache.page_size
    lanes, row_block = LANES[target.arch], schedule.int("row_block")
    if lanes % row_block:
        raise UnsupportedError(f"row_block = {row_block} does not divide the {lanes} lanes of {target.name}")
    tile = whole_tile(schedule.int("tile"), page)
    decode = variant in ("single", "multi")
    # A bf16 query over bf16 rows multiplies pairs without conversion; weights are then rounded to bf16 too.
    dot = "bf16" in target.features and att.q_dtype == "bf16"
    k_pairs = dot and spec.cache.k.format == "bf16"
    v_pairs = dot and spec.cache.v.format == "bf16"
    k_step, v_step = lanes * (2 if k_pairs else 1), lanes * (2 if v_pairs else 1)
    k_staged, v_staged = (addresses[side].stride("d") != 1 for side in ("k", "v"))
    folds = {side: fold_site(spec, side) for side in ("k", "v")}
    masks = () if variant == "single" else mask_terms(att)
    ranged = tuple(term for term in mask_terms(att) if variant != "single" or term.lo)
    # Staged rows are gathered from pieces, so there is no row to fetch ahead.
    prefetch = schedule.int("prefetch") == 1 and not (k_staged or v_staged)
    # The portable row has no instruction for f16: it converts lane by lane.
    lane_by_lane = target.arch == "portable"
    k_tail, v_tail = att.head_dim % k_step, att.v_head_dim % v_step
    helpers = _helpers(spec, prefetch, k_pairs, v_pairs, k_tail, v_tail, lane_by_lane)
    constants = [
        Constant("GROUP", att.group, "query heads that share a KV head"),
        Constant("TILE", tile, "keys between two softmax steps"),
        Constant("TILE_PAD", round_up(tile, max(lanes, 16)), "their scores, in whole vectors"),
    ]
    if decode:
        heads = schedule.int("heads")
        constants += [
            Constant(
                "SPLIT", round_up(max(schedule.int("split_tokens"), tile), tile), "keys of a unit of work"
            ),
            Constant("HEADS", heads, "KV heads of a unit of work"),
        ]
    else:
        q_tile = schedule.int("q_tile")
        constants += [
            Constant("HEADS", 1, "KV heads of a unit of work"),
            Constant("Q_TILE", q_tile, "queries of a unit of work"),
            Constant("ROWS_PAD", round_up(q_tile * att.group, row_block), "its query rows, in whole blocks"),
        ]
    constants += [
        Constant("ROW_BLOCK", row_block, "query rows of the inner kernel"),
        Constant("TOK_BLOCK", lanes // row_block, "keys of the inner kernel"),
        Constant("K_PITCH", round_up(att.head_dim, k_step), "elements of a prepared query row"),
        Constant("V_PITCH", round_up(att.v_head_dim, v_step), "elements of an accumulator row"),
    ]
    if att.window is not None:
        constants.append(Constant("WINDOW", att.window, "earlier keys that a query sees"))
    answers: dict[str, Any] = {
        "multi": variant == "multi",
        "ragged": variant != "single",
        "rules": rules,
        # Only a masked kernel has keys that some of its rows do not see.
        "helper_names": [*helpers, *(["weighed"] if v_pairs and masks else [])],
        "prefetch_next": prefetch,
        "ranged_tiles": False,
        "k_scale_step": _scale_step(addresses, "k_scale", page),
        "v_scale_step": _scale_step(addresses, "v_scale", page),
        "k_type": C_TYPES[spec.cache.k.fmt.storage],
        "k_row_type": C_TYPES[spec.cache.k.fmt.storage],
        "v_row_type": C_TYPES[spec.cache.v.fmt.storage],
        "v_type": C_TYPES[spec.cache.v.fmt.storage],
        "q_type": C_TYPES[att.q_dtype],
        "q_operand": "uint16_t" if k_pairs else "float",
        "q_prepare": "source[d]" if k_pairs else to_f32(att.q_dtype, "source[d]"),
        "out_convert": from_f32(att.q_dtype, "row[d]"),
        "k_operand": "vpairs" if k_pairs else "vf",
        "load_k": "load_pairs" if k_pairs else f"load_{spec.cache.k.fmt.storage}",
        "load_q": "load_pairs" if k_pairs else "load_f32",
        "dot_qk": _dot_qk(k_pairs),
        "k_step": k_step,
        "k_full": att.head_dim // k_step * k_step,
        "k_tail": k_tail,
        "load_v": f"load_{spec.cache.v.fmt.storage}",
        "v_pairs": v_pairs,
        "v_tail": v_tail,
        "v_chunks": v_chunks(
            att.v_head_dim, v_step, REGISTER_TILE[target.arch] // row_block // (v_step // lanes)
        ),
        "k_staged": k_staged,
        "v_staged": v_staged,
        "k_run": run_along_d(given.record, "k"),
        "v_run": run_along_d(given.record, "v"),
        "k_column": folds["k"].site == "score_column",
        "v_column": folds["v"].site == "weight_column",
        "score_scale": score_scale(folds["k"]),
        "v_static": v_static(folds["v"], decode),
        "masks": masks,
        "visible": " && ".join(f"({term.visible})" if len(masks) > 1 else term.visible for term in masks),
        "ranged": bool(ranged),
        "range": bounds(ranged),
    }
    return tuple(constants), answers


def _scale_step(addresses: Mapping[str, Address], name: str, page: int) -> int:
    """Keys whose scales share a 64-byte line: one prefetch serves them."""
    stride = addresses[name].stride("tok") if name in addresses else None
    return max(1, min(page, 16 // stride)) if stride else 1


def whole_tile(tokens: int, page: int, step: int = 1) -> int:
    """Keys of a tile near ``tokens`` that is a whole number of pages, or a whole part of one.

    A part is a multiple of ``step``, which divides the page.
    """
    if page <= tokens:
        return tokens // page * page
    return max((part for part in range(step, tokens + 1, step) if page % part == 0), default=step)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _dot_qk(pairs: bool) -> str:
    sums = "sums[r * TOK_BLOCK + t]"
    return f"dot_pairs(q_r, k_T[t], {sums})" if pairs else f"fma(q_r, k_T[t], {sums})"


def v_chunks(width: int, step: int, per_chunk: int) -> list[dict[str, int]]:
    """Cut V's elements into chunks of vectors that fit the registers; the last may have a padded tail."""
    vectors, per_chunk = -(-width // step), max(1, per_chunk)
    chunks = []
    for first in range(0, vectors, per_chunk):
        count = min(per_chunk, vectors - first)
        part = Part(first * step, count * step, min(count * step, width - first * step))
        chunks.append({"start": part.start, "count": count, "tail": part.valid % step})
    return chunks


def run_along_d(record: PageRecord, side: str) -> int:
    """Elements along d that lie side by side in a page."""
    plane = record.plane(side)
    last = plane.axes[-1]
    return last.extent or 1 if last.axis.dim == "d" else 1


def score_scale(fold: FoldSite) -> str:
    if fold.site == "score_scale":
        at = "u.head0 + h" if fold.per_head else "0"
        return f"(float)a.score_scale * a.k_scale[{at}]"
    return "(float)a.score_scale"


def v_static(fold: FoldSite, decode: bool) -> str:
    """Text of the V scale of the head being finished; empty where V has no static scale."""
    if fold.site != "output":
        return ""
    at = "0" if not fold.per_head else "u.head0 + h" if decode else "u.head0"
    return f"a.v_scale[{at}]"


def bounds(terms: tuple[MaskTerm, ...]) -> dict[str, str]:
    """The tightest bound of all terms, as C++ text; empty where none bounds."""

    def tightest(texts: list[str], pick: str) -> str:
        while len(texts) > 1:
            texts = [f"std::{pick}<int64_t>({texts[0]}, {texts[1]})", *texts[2:]]
        return texts[0] if texts else ""

    return {
        "lo": tightest([t.lo for t in terms if t.lo], "max"),
        "hi": tightest([t.hi for t in terms if t.hi], "min"),
        "full_lo": tightest([t.full_lo for t in terms if t.full_lo], "max"),
        "full_hi": tightest([t.full_hi for t in terms if t.full_hi], "min"),
    }


def _helpers(
    spec: Spec, prefetch: bool, k_pairs: bool, v_pairs: bool, k_tail: int, v_tail: int, lane_by_lane: bool
) -> list[str]:
    """Names of the helper functions that the kernel calls, in the order in which they are defined."""
    dtype = spec.attention.q_dtype
    scalar = writing(dtype) | (set() if k_pairs else reading(dtype))
    if v_pairs:
        scalar |= reading("bf16") | writing("bf16")  # an odd last key is halved
    loads = set()
    for side, pairs, tail in (("k", k_pairs, k_tail), ("v", v_pairs, v_tail)):
        storage = spec.cache.quant(side).fmt.storage
        if not pairs:
            loads |= {f"load_{storage}"} | ({f"load_{storage}_part"} if tail else set())
    loads.discard("load_f32")  # part of `vector`: states are f32 whatever the format
    if (k_pairs and k_tail) or (v_pairs and v_tail):
        loads.add("load_pairs_part")
    names = [*sorted(scalar), "vector", *sorted(loads), "reduce", "exp2", "sum_each"]
    if lane_by_lane and "load_f16" in loads and "f16_to_f32" not in names:
        names.insert(0, "f16_to_f32")
    if k_pairs or v_pairs:
        names.insert(names.index("reduce"), "pairs")
        names.sort(key=lambda n: n == "load_pairs_part")
    if v_pairs:
        names.append("weave")
    return names + (["prefetch"] if prefetch else [])
