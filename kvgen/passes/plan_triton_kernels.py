"""What a Triton attention kernel is called with and what its header says: rows, states, parameters, words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from kvgen.errors import UnsupportedError
from kvgen.ir import Schedule, Spec, Target
from kvgen.ir.plan import Arg, Constant
from kvgen.passes.plan_triton_codec import Codec
from kvgen.passes.plan_triton_mask import Mask
from kvgen.passes.plan_triton_parts import Entry, params, scalar
from kvgen.passes.plan_triton_rules import Rules

DECODE_ROWS = 8
"""Longest query that decode is meant for (longer ones run, in more row tiles)."""

LEAST_ROWS = 16
"""Query rows that a tensor core takes at least."""

FOLDED_ROWS = 8
"""Most query heads of a KV head whose softmax runs on 8 rows."""

SPLIT_ROW = "SPLIT_ROW"
"""Constant: floats of one split's state in the workspace, its output and logsumexp padded to 16 bytes."""


def row_tile(op: str, spec: Spec, schedule: Schedule, ragged: bool) -> int:
    """Query rows of a tile: a power of two, at least the 16 that a tensor core takes."""
    group, most = spec.attention.group, schedule.int("rows")
    wanted = group * (DECODE_ROWS if ragged else 1) if op == "decode" else most
    return min(most, max(LEAST_ROWS, 1 << (wanted - 1).bit_length()))


def ignored(op: str, spec: Spec, ragged: bool, rules: Rules, *, valued: bool) -> tuple[str, ...]:
    """Knobs that an attention kernel has no use for. ``valued``: codes become numbers as they are read."""
    group = spec.attention.group
    whole = op == "decode" and group * (DECODE_ROWS if ragged else 1) <= LEAST_ROWS
    found = {
        "rows": whole,
        "ids": valued or rules.mask.never_full,  # pages are looked up ahead for full tiles
        "fold_rows": op == "decode" and (valued or ragged or group > FOLDED_ROWS or not rules.folds),
        "unroll": op == "decode" and rules.mask.never_full,
        "edges": op == "prefill" and rules.mask.never_full,
    }
    return tuple(knob for knob, idle in found.items() if idle)


def split_row(spec: Spec) -> int:
    """Floats of one split's partial state, a multiple of 4 so that every one starts on 16 bytes."""
    return -(-(spec.attention.v_head_dim + 1) // 4) * 4


def head_of_row(group: int, ragged: bool) -> str:
    """The query head of each row of a tile."""
    if not ragged:
        return "head * GROUP + row_M"
    return "head" if group == 1 else "head * GROUP + row_M % GROUP"


def live_rows(group: int, ragged: bool, rows: int) -> str:
    """Which rows exist; empty where all do."""
    if ragged:
        return "token_M < q_len"
    return "" if group % rows == 0 else "row_M < GROUP"


def entries(
    op: str,
    args: tuple[Arg, ...],
    schedule: Schedule,
    ragged: bool,
    codec: Codec,
    read: Collection[str],
    merged: Collection[str],
) -> tuple[Entry, ...]:
    """The kernels of the module: prefill, or decode's split and merge.

    ``read`` and ``merged`` name the arguments of ``spec.attention.params`` that the first kernel and the
    merge read.
    """
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
    given = {p.value for p in every if p.value.startswith("param_")}
    outputs = {p.value for p in every if p.value.split("_stride_")[0] in ("out", "lse")}
    # Rows of several queries do not fold, so their softmax takes about twice the registers.
    warps = min(8, schedule.int("num_warps") * (2 if op == "decode" and ragged else 1))
    stages = schedule.int("num_stages")
    if op == "prefill":
        left_out = host_only | {"workspace"} | given.difference(read)
        return (Entry("prefill", tuple(p for p in every if p.value not in left_out), warps, stages),)
    split = tuple(p for p in every if p.value not in host_only | outputs | given.difference(read))
    taken = outputs | {"workspace", "kv_lens", "q_starts"} | given.intersection(merged)
    merge = tuple(p for p in every if p.value in taken)
    return (
        Entry("decode_split", split, warps, stages),
        Entry("merge_splits", (*merge, scalar("num_splits", "splits of the grid")), 1, 4),
    )


def kernel_constants(
    op: str, spec: Spec, schedule: Schedule, target: Target, answers: Mapping[str, Any], rules: Rules
) -> list[Constant]:
    """The constants of decode and prefill. Raises UnsupportedError where a split is not whole tiles."""
    att, tile = spec.attention, schedule.int("tile")
    constants = [
        Constant("GROUP", att.group, "query heads that share one KV head"),
        Constant("ROWS", answers["rows"], "query rows of a tile: (token, head of the group) packed"),
        Constant("TILE", tile, "keys of a tile"),
        Constant("PAGE", spec.cache.page_size, "tokens of a page"),
    ]
    if op == "decode" and (answers["ragged"] or answers["row_tiles"] > 1):
        constants.append(Constant("KV_HEADS", att.kv_heads, "KV heads"))
    constants += rules.constants
    if op == "decode" or (answers["wild"] and not answers["values"]):
        constants.append(Constant("V_HEAD_DIM", att.v_head_dim, "elements of an output row"))
    if op == "decode":
        split = schedule.int("split_tokens")
        if split % tile:
            raise UnsupportedError(f"split_tokens = {split} must be a multiple of tile = {tile}")
        constants += [
            Constant("Q_HEADS", att.q_heads, "query heads"),
            Constant("SPLIT_TOKENS", split, "keys of a split"),
            Constant(SPLIT_ROW, split_row(spec), "floats of a split's state: output, then logsumexp"),
            Constant("MERGE_ROWS", 16 if target.interpreted else 1, "rows that one program merges"),
        ]
    return constants


def loads_of_edges(op: str, spec: Spec, schedule: Schedule, mask: Mask) -> str:
    """How masked tiles are loaded: ``plain``, into registers, or ``async``, through the pipeline."""
    if mask.never_full:  # they are the main loop
        return "async"
    if op == "prefill":
        return str(schedule["edges"])
    return "async" if spec.cache.alias else "plain"  # a tile of K that holds V too is wide


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def summary(spec: Spec, op: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """The header's words: what the kernel does and how programs share the work."""
    att, cache = spec.attention, spec.cache
    keys = f" ({', '.join(words)})" if words else ""
    heads = f"{_count(att.q_heads, 'query head')} over {_count(att.kv_heads, 'KV head')}"
    lines = [
        f"{heads} of {att.head_dim} elements{keys}.",
        f"q {att.q_dtype}, K {cache.label('k')}, V {cache.label('v')}.",
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
