"""plan decode and prefill for Triton: rows, KV tiles, loops and fold sites of one attention kernel.

Query rows of a request are packed (token, head of the group) into tiles of ``ROWS`` rows that share one KV
head, so decode and prefill are the same loop; decode adds the cut of the keys into splits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvgen.errors import UnsupportedError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import Arg, Constant, Fact
from kvgen.passes.address import Address
from kvgen.passes.lower import fold_site
from kvgen.passes.plan_triton_codec import Codec, codec_for
from kvgen.passes.plan_triton_mask import Mask, mask_for, segments
from kvgen.passes.plan_triton_pages import View, lookup_for
from kvgen.passes.plan_triton_parts import Entry, aligned, params, scalar, split_d
from kvgen.passes.plan_triton_tiles import outputs, side
from kvgen.passes.plan_triton_types import needs_casts, pv_dot, qk_dot, store_text, widen_text
from kvgen.passes.plan_triton_words import word_address, word_plane

DECODE_ROWS = 8
"""Longest query that decode is meant for (longer ones run, in more row tiles)."""

SPLIT_ROW = "SPLIT_ROW"
"""Constant: floats of one split's state in the workspace, its output and logsumexp padded to 16 bytes."""


def attention_answers(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str,
    addresses: dict[str, Address], args: tuple[Arg, ...],
) -> tuple[dict[str, Any], tuple[Constant, ...], tuple[Fact, ...]]:  # fmt: skip
    """Answers, constants and facts of ``decode`` (variant ``single`` or ``multi``) or ``prefill``.

    Raises UnsupportedError for a schedule whose numbers do not fit each other.
    """
    att = spec.attention
    ragged = op == "prefill" or variant == "multi"
    tile, rows = schedule.int("tile"), row_tile(op, spec, schedule, ragged)
    lookup, mask = lookup_for(spec.cache.page_size, tile, target), mask_for(spec, ragged=ragged)
    codec = codec_for(spec, target, record)
    readers = {"k": codec.k, "v": codec.v}
    worded = tuple(name for name, reader in readers.items() if reader.word > 1)
    for name in worded:
        words = word_plane(record.plane(name))
        assert words is not None
        addresses[name] = word_address(words)
    qk, pv = qk_dot(spec, target, codec), pv_dot(spec, target, codec)
    k_side = side(spec, "k", att.head_dim, codec.k, int8=qk.compute == "int8")
    v_side = side(spec, "v", att.v_head_dim, codec.v, int8=False)
    parts = {"k": k_side.parts, "v": v_side.parts}
    multiple = _multiples(spec, record, codec)
    views = {
        plane.name: View(
            plane.name,
            addresses[plane.name],
            lookup,
            parts.get(plane.name, ()),
            readers[plane.name].word if plane.name in readers else 1,
            multiple[plane.name] if codec.ptx else 0,
        )
        for plane in record.planes
    }
    fold = {name: fold_site(spec, name) for name in ("k", "v")}
    folded = not ragged and att.group <= 8 and bool(schedule["fold_rows"])
    answers: dict[str, Any] = {
        "ragged": ragged,
        "rows": rows,
        "soft": "H" if folded else "M",
        "fold_rows": folded,
        "lookup": lookup,
        "ahead": schedule["ids"] == "ahead",
        "mask": mask,
        "segments": segments(mask),
        "views": views,
        "k_parts": k_side.parts,
        "v_parts": v_side.parts,
        "k_side": k_side,
        "v_side": v_side,
        "outs": outputs(v_side, codec.v),
        "d_parts": split_d(att.v_head_dim),
        "codec": codec,
        "widens": any(view.widens for view in views.values()),
        "worded": worded,
        "word_strides": [t.stride_name for n in worded for t in addresses[n].terms if t.stride is None],
        "qk": qk,
        "pv": pv,
        "k_fold": fold["k"],
        "v_fold": fold["v"],
        # Weights times V's scale can leave f16's range: they are counted in units of the largest scale.
        "v_unit": fold["v"].site == "weight_column" and pv.compute == "f16",
        # Codes are finite unless e4m3 has its scales given; a scale that is not finite is masked with its
        # weight.
        "wild": bool(mask.by_row) and (not spec.cache.v.fmt.scaled or _nan_codes(spec)),
        "sum_late": op == "decode",
        "unroll": schedule.int("unroll") if op == "decode" else 1,
        "edges": schedule["edges"] if op == "prefill" else "plain",
        "bf16_casts_used": needs_casts(target, att.q_dtype, spec.cache.k.format, spec.cache.v.format),
        "token_of_row": "row_M" if att.group == 1 else "row_M // GROUP",
        "head_of_row": _head_of_row(att.group, ragged),
        "row_tiles": 1 if ragged else -(-att.group // rows),
        "live": _live(att.group, ragged, rows),
        "to_out": partial(store_text, dtype=att.q_dtype, target=target),
        "rescues_e4m3": bool(mask.by_row) and _nan_codes(spec),
        "v_widen": "e4m3_to_f16({}).to(tl.float32)"
        if _nan_codes(spec)
        else widen_text(spec.cache.v.fmt.storage, "f32", target),
        "out_widen": widen_text(att.q_dtype, "f32", target),
        "stored_f32": partial(store_text, dtype="f32", target=target),
        "summary": _summary(spec, op, ragged),
        "kernels": _entries(op, args, schedule, ragged, codec),
    }
    constants = []
    if codec.q == "digits":
        constants.append(Constant("DIGIT", codec.digit, "low digits per high digit of q"))
    constants += [
        Constant("GROUP", att.group, "query heads that share one KV head"),
        Constant("ROWS", rows, "query rows of a tile: (token, head of the group) packed"),
        Constant("TILE", tile, "keys of a tile"),
        Constant("PAGE", spec.cache.page_size, "tokens of a page"),
    ]
    if op == "decode" and (ragged or answers["row_tiles"] > 1):
        constants.append(Constant("KV_HEADS", att.kv_heads, "KV heads"))
    if mask.window is not None:
        constants.append(Constant("WINDOW", mask.window, "earlier keys a query sees beside its own"))
    if op == "decode" or answers["wild"]:
        constants.append(Constant("V_HEAD_DIM", att.v_head_dim, "elements of an output row"))
    if op == "decode":
        answers |= _merge_ranges(spec, mask, ragged)
        split = schedule.int("split_tokens")
        if split % tile:
            raise UnsupportedError(f"split_tokens = {split} must be a multiple of tile = {tile}")
        constants += [
            Constant("Q_HEADS", att.q_heads, "query heads"),
            Constant("SPLIT_TOKENS", split, "keys of a split"),
            Constant(SPLIT_ROW, split_row(spec), "floats of a split's state: output, then logsumexp"),
            Constant("MERGE_ROWS", 16 if target.interpreted else 1, "rows that one program merges"),
        ]
    facts = (
        Fact(f"pages are looked up by {lookup.kind}", f"page {spec.cache.page_size}, tile {tile}"),
        Fact(
            f"q.k is computed in {qk.compute} {qk.precision}".rstrip(),
            f"q {att.q_dtype}, K {spec.cache.k.format}",
        ),
        Fact(f"weights.v is computed in {pv.compute} {pv.precision}".rstrip(), f"V {spec.cache.v.format}"),
    )
    return answers, tuple(constants), facts


def _multiples(spec: Spec, record: PageRecord, codec: Codec) -> dict[str, int]:
    """What each plane's page stride is promised to be a multiple of, in loaded elements."""
    promised = aligned(spec, record)
    found = {p.name: 16 if f"{p.name}_stride_page" in promised else 1 for p in record.planes}
    readers = {"k": codec.k, "v": codec.v}
    return found | {n: max(1, found[n] // reader.word) for n, reader in readers.items()}


def _nan_codes(spec: Spec) -> bool:
    """Whether a code of V may stand for NaN."""
    v = spec.cache.v
    return v.format == "e4m3" and v.static_scale


def _merge_ranges(spec: Spec, mask: Mask, ragged: bool) -> dict[str, str]:
    """The splits that hold a key of a row, as texts: what the first kernel wrote for it, and no other."""
    if not ragged:
        first, end = mask.kv_lo, mask.kv_hi
    else:
        first = "0" if mask.window is None else "tl.maximum(pos_R - WINDOW, 0)"
        end = "tl.maximum(pos_R + 1, 0)" if spec.attention.causal else "kv_len"
    return {
        "merge_first": first if first == "0" else f"{first} // SPLIT_TOKENS",
        "merge_end": f"tl.cdiv({end}, SPLIT_TOKENS)",
    }


def _summary(spec: Spec, op: str, ragged: bool) -> tuple[str, ...]:
    """The header's words: what the kernel does and how programs share the work."""
    att, cache = spec.attention, spec.cache
    rules = ["causal, aligned to the last key"] if att.causal and ragged else []
    rules += [f"window of {att.window} earlier keys"] if att.window is not None else []
    keys = f" ({', '.join(rules)})" if rules else ""
    lines = [
        f"{att.q_heads} query heads over {att.kv_heads} KV heads of {att.head_dim} elements{keys}.",
        f"q {att.q_dtype}, K {cache.k.format}, V {cache.v.format}.",
        f"Pages of {cache.page_size} tokens laid out '{cache.layout}'.",
    ]
    if op == "decode":
        lines += [
            "One program attends to one split of a request's keys with one tile of query rows and leaves",
            "the state (out, lse) in the workspace; merge_splits joins the states. Logsumexp is base 2.",
        ]
    else:
        lines += ["One program attends with one tile of a request's query rows to all keys they see."]
    return tuple(lines)


def row_tile(op: str, spec: Spec, schedule: Schedule, ragged: bool) -> int:
    """Query rows of a tile: a power of two, at least the 16 that a tensor core takes."""
    group, most = spec.attention.group, schedule.int("rows")
    wanted = group * (DECODE_ROWS if ragged else 1) if op == "decode" else most
    return min(most, max(16, 1 << (wanted - 1).bit_length()))


def split_row(spec: Spec) -> int:
    """Floats of one split's partial state, a multiple of 4 so that every one starts on 16 bytes."""
    return -(-(spec.attention.v_head_dim + 1) // 4) * 4


def _head_of_row(group: int, ragged: bool) -> str:
    """The query head of each row of a tile."""
    if not ragged:
        return "head * GROUP + row_M"
    return "head" if group == 1 else "head * GROUP + row_M % GROUP"


def _live(group: int, ragged: bool, rows: int) -> str:
    """Which rows exist; empty where all do."""
    if ragged:
        return "token_M < q_len"
    return "" if group % rows == 0 else "row_M < GROUP"


def _entries(
    op: str, args: tuple[Arg, ...], schedule: Schedule, ragged: bool, codec: Codec
) -> tuple[Entry, ...]:
    """The kernels of the module: prefill, or decode's split and merge."""
    worded = [name for name, reader in (("k", codec.k), ("v", codec.v)) if reader.word > 1]
    kinds = {"workspace": "*fp32"} | dict.fromkeys(worded, "*i16")
    # A page of 2**31 elements does not exist, and 32-bit strides multiply ids faster; a launch checks them.
    kinds |= {arg.name: "i32" for arg in args if arg.name.endswith("_stride_page")}
    docs = {"workspace": "f32: states of the splits, T x q_heads x splits x SPLIT_ROW"}
    docs |= {name: f"bytes as int16 words: {name} plane" for name in worded}
    every = tuple(
        replace(p, kind=kinds.get(p.value, p.kind), doc=docs.get(p.value, p.doc)) for p in params(args)
    )
    host_only = {"batch", "max_q_len", "table_width"}
    outputs = {p.value for p in every if p.value.split("_stride_")[0] in ("out", "lse")}
    # Rows of several queries do not fold, so their softmax takes about twice the registers.
    warps = min(8, schedule.int("num_warps") * (2 if op == "decode" and ragged else 1))
    stages = schedule.int("num_stages")
    if op == "prefill":
        own = tuple(p for p in every if p.value not in host_only | {"workspace"})
        return (Entry("prefill", own, warps, stages),)
    split = tuple(p for p in every if p.value not in host_only | outputs)
    merge = tuple(p for p in every if p.value in outputs | {"workspace", "kv_lens", "q_starts"})
    return (
        Entry("decode_split", split, warps, stages),
        Entry("merge_splits", (*merge, scalar("num_splits", "splits of the grid")), 1, 4),
    )
