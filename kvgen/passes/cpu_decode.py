"""What decode asks the plan on the CPU: tiles of whole pages, the form of each side, fold sites, masks."""

from __future__ import annotations

from math import gcd
from typing import Any

from kvgen.errors import UnsupportedError
from kvgen.ir import Spec, rules
from kvgen.ir.plan import Constant
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.passes.cpu_attention import (
    LANES,
    LOG2E,
    REGISTER_TILE,
    Answers,
    Inputs,
    round_up,
    run_along_d,
    score_scale,
    v_chunks,
    v_static,
    whole_tile,
)
from kvgen.passes.cpu_panels import LINE, digits
from kvgen.passes.cpu_range import key_range
from kvgen.passes.cpu_raw import raw_constants
from kvgen.passes.cpu_rope import rotation
from kvgen.passes.cpu_sides import Side, fold, sides
from kvgen.passes.cpu_terms import attention_terms, helper_texts, term_words
from kvgen.passes.cpu_text import C_TYPES, from_f32, reading, to_f32, writing
from kvgen.passes.cpu_values import value_answers
from kvgen.passes.terms import masking, scoring

_CONVERSIONS = ("bf16_to_f32", "f16_to_f32", "e4m3_to_f32")

MOST_VECTORS = 4
"""Vectors of keys of one call of the score kernel: with 4 query rows, 16 sums."""


PLACES = {
    "batch": "b",
    "kv_len": "r.position + r.q_len",
    "q_len": "r.q_len",
    "q_row": "r.q_row + own / GROUP",
    "q_pos": "r.position + own / GROUP",
    "kv_head": "u.head0 + h",
    "head": "(u.head0 + h) * GROUP + own % GROUP",
}
"""What ``know_rows`` calls the names of expressions."""


def decode_answers(given: Inputs) -> Answers:
    """Constants and answers of the decode template (variant ``single``, ``multi`` or ``prefix``)."""
    spec, schedule, target = given.spec, given.schedule, given.target
    att, page, multi = spec.attention, spec.cache.page_size, given.variant != "single"
    lanes, row_block = LANES[target.arch], schedule.int("row_block")
    if lanes % row_block:
        raise UnsupportedError(f"row_block = {row_block} does not divide the {lanes} lanes of {target.name}")
    k, v = sides(given, lanes)
    alias = spec.cache.alias
    tile = whole_tile(schedule.int("tile"), page, _tile_step(k, v, lanes))
    block = min(page, tile)
    vectors = max(n for n in range(1, MOST_VECTORS + 1) if (tile // lanes or 1) % n == 0)
    if k.blocks > 1:
        vectors = min(vectors, 2)
    k_step, v_step = _step(k, lanes), _step(v, lanes)
    v_packed = v.panel is not None and len(v.panel.parts) > 1
    k_digits = digits(spec, "k") if k.panel and k.panel.integer else 0
    v_digits = digits(spec, "v") if v.panel and v.panel.integer else 0
    seen = masking(spec, single=not multi, prefix=given.variant == "prefix")
    score = scoring(spec)
    terms = attention_terms(seen, score, att.params, PLACES)
    ranges = key_range(seen, att.params)
    rope = rotation(att, "pre")
    sink = att.sink and given.variant != "prefix"
    prefetch = schedule.int("prefetch") == 1 and not (k.staged or v.staged)
    fetch_values = schedule.int("prefetch") == 1 and bool(k.value or v.value)
    fetching = prefetch or fetch_values
    v_tail = (att.v_head_dim // (2 if v_packed else 1)) % v_step
    k_tail = 0 if k.panel else att.head_dim % k_step
    folds = {side: fold(spec, side) for side in ("k", "v")}
    values = tuple(side.value for side in (k, v) if side.value and side.staged)
    k_pitch = round_up(att.head_dim, lanes if k.panel else k_step)
    # Halves of codes have whole vectors of sums each.
    v_half = round_up(att.v_head_dim // 2, v_step) if v_packed else 0
    v_pitch = 2 * v_half or round_up(att.v_head_dim, v_step)
    constants = [
        Constant("GROUP", att.group, "query heads that share a KV head"),
        Constant("TILE", tile, "keys between two softmax steps"),
        Constant("TILE_PAD", round_up(tile, max(lanes, 16)), "scores of a tile, rounded up to whole vectors"),
        Constant("BLOCK", block, "keys of a tile that lie in one page"),
        Constant("BLOCKS", tile // block, "pages of a tile, or 1 where a page has several tiles"),
        Constant("SPLIT", round_up(max(schedule.int("split_tokens"), tile), tile), "keys of a unit of work"),
        Constant("HEADS", schedule.int("heads"), "KV heads of a unit of work"),
        Constant("ROW_BLOCK", row_block, "query rows that the inner kernels take at once"),
        Constant("K_PITCH", k_pitch, "elements of a prepared query row"),
        Constant("V_PITCH", v_pitch, "elements of an accumulator row"),
    ]
    if k.panel:
        chains = 1 if k.blocks > 1 else gcd(MOST_VECTORS // vectors, k.panel.steps)
        constants.append(Constant("VECTORS", vectors, "vectors of keys that the score kernel takes at once"))
        constants.append(Constant("CHAINS", chains, "independent sums of a score, added up at the end"))
    else:
        constants.append(Constant("TOK_BLOCK", lanes // row_block, "keys a call of the score kernel takes"))
    q_rounded = _rounds_query(spec, k)
    if q_rounded:
        constants.append(Constant("SMALLEST_AMAX", ZERO_BLOCK_AMAX, "a row below this is zero"))
    if sink:
        constants.append(Constant("LOG2E", LOG2E, "natural units to those of base 2"))
    constants += (*terms.constants, *(rope.constants if rope else ()), *raw_constants(spec))
    per_chunk = REGISTER_TILE[target.arch] // row_block // (2 if v_packed or (v.pairs and not v.panel) else 1)
    answers: dict[str, Any] = {
        "multi": multi,
        "words": term_words(att, seen, score),
        "ragged": multi,
        "rules": rules,
        "helper_names": _helpers(given, k, v, fetching, k_tail, v_tail, bool(terms.predicate)),
        "term_helpers": helper_texts(terms.helpers, ranges.helpers),
        "prefetch_next": prefetch,
        "ignored": ("prefetch",) if (k.staged or v.staged) and not (k.value or v.value) else (),
        "prefetch_v": prefetch and not alias,
        "fetch_values": fetch_values,
        # Many blocks of rows meet a tile of latent rows: fetched by one of them, the next came in a burst.
        "fetch_shares": alias and not k.panel and att.group >= 4 * row_block,
        "alias": alias,
        "plane_of": {"k": "k", "v": "k" if alias else "v"},
        "v_rows": "k" if alias and not (k.panel or rope) else "v",
        "rope": rope,
        "c_types": C_TYPES,
        # Units of some heads only follow one another on the same pages.
        "look_ahead": prefetch and schedule.int("heads") == att.kv_heads,
        "part_page": tile < page,
        "whole_vectors": tile % lanes == 0,
        "ranged_tiles": bool(ranges.lo),
        "rows_bounded": not (k.panel and v.panel),
        "scale_bytes": {side: _scale_bytes(given, side, block) for side in ("k", "v")},
        "k_panel": k.panel,
        "v_panel": v.panel,
        "k_digits": k_digits,
        "q_rounded": q_rounded,
        "v_digits": v_digits,
        "k_digit_list": tuple(range(k_digits or 1)),
        "v_digit_list": tuple(range(v_digits or 1)),
        "k_bias": 8 if k.panel and len(k.panel.parts) > 1 else 128,
        "v_most": 255 if v_digits == 1 else 65535,
        "v_unit": 16 if v_packed else 1,
        "k_blocks": k.blocks,
        "v_blocks": v.blocks,
        "k_block": str(spec.cache.k.d_block or att.head_dim),
        "v_block": str(spec.cache.v.d_block or att.v_head_dim),
        "k_type": C_TYPES[spec.cache.k.fmt.storage],
        "v_type": C_TYPES[spec.cache.v.fmt.storage],
        "k_row_type": k.row_type,
        "v_row_type": v.row_type,
        "q_type": C_TYPES[att.q_dtype],
        "q_operand": "uint16_t" if k.pairs else "float",
        "q_prepare": "source[d]" if k.pairs else to_f32(att.q_dtype, "source[d]"),
        "out_convert": from_f32(
            att.q_dtype,
            "x[d]" if v.value and v.value.norm else f"no_infinity(row[d]{' * factor' if sink else ''})",
        ),
        "k_operand": "vpairs" if k.pairs else "vf",
        "load_k": "load_pairs" if k.pairs else f"load_{k.row_format}",
        "load_q": "load_pairs" if k.pairs else "load_f32",
        "dot_qk": f"{'dot_pairs' if k.pairs else 'fma'}(q_r, k_T[t], sums[r * TOK_BLOCK + t])",
        "k_line": LINE // given.record.plane("k").itemsize,
        "v_line": LINE // given.record.plane("v").itemsize,
        "k_step": k_step,
        "k_full": att.head_dim // k_step * k_step,
        "k_tail": k_tail,
        "load_v": f"load_{v.row_format}",
        "v_pairs": v.pairs,
        "v_half": v_half if v_half * 2 != att.v_head_dim else 0,
        "v_tail": v_tail,
        "v_chunks": _chunks(spec, v, v_step, per_chunk),
        "k_staged": k.staged,
        "v_staged": v.staged,
        "k_run": run_along_d(given.record, "k") if k.stage.plain else 1,
        "v_run": run_along_d(given.record, "v") if v.stage.plain else 1,
        "stage_decode": {"k": k.stage, "v": v.stage},
        "values": bool(values),
        "raw": spec.cache.raw,
        "k_value": k.value,
        "v_value": v.value,
        **value_answers(values, target),
        "k_column": k.column,
        "v_column": v.column,
        "score_scale": score_scale(folds["k"]),
        "v_static": v_static(folds["v"], decode=True, plane="k" if alias else "v"),
        "predicate": terms.predicate,
        "predicate_uses": terms.predicate_uses,
        "score_text": terms.score,
        "score_uses": terms.score_uses,
        "keyed": terms.keyed,
        "placed": terms.placed,
        "row_values": terms.values,
        "row_uses": terms.uses,
        "never_full": bool(terms.predicate) and seen.never_full,
        "keys_end": "end" if seen.never_full and terms.predicate else "(WHOLE ? TILE : end)",
        "range": ranges,
        "sink": sink,
    }
    return tuple(constants), answers


def _rounds_query(spec: Spec, k: Side) -> bool:
    """Whether the query is rounded to int8 codes although it meets K as f32 numbers."""
    return spec.attention.qk == "int8" and not (k.panel and k.panel.integer)


def _tile_step(k: Side, v: Side, lanes: int) -> int:
    """Keys that a part of a page must be a multiple of."""
    return lanes if k.panel else v.panel.inner if v.panel else 1


def _step(side: Side, lanes: int) -> int:
    """Elements of d of one vector of a row, or of V's accumulators."""
    return lanes * (2 if side.pairs and not side.panel else 1)


def _chunks(spec: Spec, v: Side, step: int, per_chunk: int) -> list[dict[str, int]]:
    """Chunks of V's vectors that the registers hold; none crosses a block of d with weights of its own."""
    packed = 2 if v.panel and len(v.panel.parts) > 1 else 1
    width = spec.attention.v_head_dim // packed
    if v.blocks == 1:
        return [chunk | {"block": 0} for chunk in v_chunks(width, step, per_chunk)]
    size = spec.cache.v.d_block or width
    return [
        {"start": block * size + chunk["start"], "count": chunk["count"], "tail": 0, "block": block}
        for block in range(width // size)
        for chunk in v_chunks(size, step, per_chunk)
    ]


def _scale_bytes(given: Inputs, side: str, block: int) -> int:
    """Bytes of the lines that hold a head's scales of ``block`` keys, where they begin at the first key's."""
    name = f"{side}_scale"
    if not given.record.has(name):  # given ones, which stay in the cache, have no plane
        return 0
    plane = given.record.plane(name)
    axes = [placed for placed in plane.inside if placed.axis.dim in ("tok", "d")]
    extent = sum(((placed.extent or 1) - 1) * placed.stride.fixed for placed in axes) + plane.itemsize
    return min(extent, 64 * block)


def _helpers(
    given: Inputs, k: Side, v: Side, prefetch: bool, k_tail: int, v_tail: int, masked: bool
) -> list[str]:
    """Names of the helper functions that the kernel calls, in the order in which they are defined."""
    dtype = given.spec.attention.q_dtype
    scalar = {"no_infinity"} | writing(dtype) | (set() if k.pairs else reading(dtype))
    woven = v.pairs and not v.panel
    for side in (k, v):
        scalar |= {name for name in _CONVERSIONS if name in side.stage.text}
        scalar |= side.value.scalars if side.value else set()
    loads: set[str] = set()
    last: list[str] = []
    for side, tail in ((k, k_tail), (v, v_tail)):
        kind = side.panel.load if side.panel else "load_pairs" if side.pairs else f"load_{side.row_format}"
        if kind not in ("load_pairs", "load_quads"):
            loads.add(kind)
        if tail:
            (last.append if kind in ("load_pairs", "load_quads") else loads.add)(f"{kind}_part")
    loads.discard("load_f32")  # part of `vector`: states are f32 whatever the format
    rounding = ["to_integer", "find_scale"] if _rounds_query(given.spec, k) else []
    names = [*sorted(scalar), *rounding, "vector", *sorted(loads)]
    if given.target.arch == "portable":  # it converts lane by lane
        lane_by_lane = {f"{dtype}_to_f32" for dtype in ("f16", "e4m3") if f"load_{dtype}" in loads}
        names = [*sorted(lane_by_lane - set(names)), *names]
    integer = [side.panel for side in (k, v) if side.panel and side.panel.integer]
    names += (["pairs"] if k.pairs or v.pairs else []) + (["quads"] if integer else []) + sorted(set(last))
    short = given.target.arch == "avx512" and dtype != "f32"
    names += ["reduce", "softmax", "exp2_short" if short else "exp2"] + ([] if k.panel else ["sum_each"])
    if integer:
        names += ["digits"]
    if k.panel and k.panel.integer:
        names += ["nibbles_biased" if len(k.panel.parts) > 1 else "biased"]
        names += ["load_i32"] if k.panel.score_type == "int32_t" else []
    if v.panel and len(v.panel.parts) > 1:
        names += ["nibbles"]
    names += ["weave"] if woven else ["keep_pairs"] if v.pairs else []
    names += ["weighed"] if v.pairs and masked else []
    return names + (["prefetch"] if prefetch else [])
