"""plan decode and prefill for Triton: rows, KV tiles, loops and fold sites of one attention kernel.

Query rows of a request are packed (token, head of the group) into tiles of ``ROWS`` rows that share one KV
head, so decode and prefill are the same loop; decode adds the cut of the keys into splits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import Arg, Constant, Fact
from kvgen.passes.address import Address
from kvgen.passes.lower import fold_site
from kvgen.passes.plan_triton_codec import Codec, codec_for
from kvgen.passes.plan_triton_kernels import (
    FOLDED_ROWS,
    entries,
    head_of_row,
    ignored,
    kernel_constants,
    live_rows,
    loads_of_edges,
    row_tile,
    summary,
)
from kvgen.passes.plan_triton_pages import View, lookup_for
from kvgen.passes.plan_triton_parts import aligned, split_d
from kvgen.passes.plan_triton_raw import is_valued
from kvgen.passes.plan_triton_rules import rules_for
from kvgen.passes.plan_triton_tiles import outputs, side
from kvgen.passes.plan_triton_types import needs_casts, pv_dot, qk_dot, store_text, widen_text
from kvgen.passes.plan_triton_unturned import check_turning, reads_unturned, turned_cuts, turning_for
from kvgen.passes.plan_triton_valued import valued_kernel
from kvgen.passes.plan_triton_words import word_address, word_plane


def attention_answers(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str,
    addresses: dict[str, Address], args: tuple[Arg, ...],
) -> tuple[dict[str, Any], tuple[Constant, ...], tuple[Fact, ...]]:  # fmt: skip
    """Answers, constants and facts of ``decode`` (``single``, ``multi`` or ``prefix``) or ``prefill``.

    Raises UnsupportedError for a schedule whose numbers do not fit each other, and for what has no kernel.
    """
    att = spec.attention
    ragged = op == "prefill" or variant != "single"
    tile, rows = schedule.int("tile"), row_tile(op, spec, schedule, ragged)
    live = live_rows(att.group, ragged, rows)
    foldable = not ragged and att.group <= FOLDED_ROWS and bool(schedule["fold_rows"])
    rules = rules_for(op, spec, variant, foldable=foldable, live=bool(live))
    mask, folded = rules.mask, rules.folded
    lookup = lookup_for(spec.cache.page_size, tile, target, att.head_dim)
    if turned := reads_unturned(spec):
        check_turning(spec)
    if is_valued(spec):
        return valued_kernel(op, spec, record, schedule, target, variant, addresses, args)
    codec = codec_for(spec, target, record)
    readers = {"k": codec.k, "v": codec.v}
    worded = tuple(name for name in spec.cache.fields if readers[name].word > 1)
    for name in worded:
        words = word_plane(record.plane(name))
        assert words is not None
        addresses[name] = word_address(words)
    if spec.cache.alias:
        addresses["v"] = addresses["k"]
    qk, pv = qk_dot(spec, target, codec), pv_dot(spec, target, codec)
    cuts = [att.v_head_dim] if spec.cache.alias else turned_cuts(spec) if turned else []
    paired = att.rope.dim if att.rope and turned and att.rope.pairing == "interleaved" else 0
    k_side = side(spec, "k", att.head_dim, codec.k, int8=qk.compute == "int8", cuts=cuts, paired=paired)
    if spec.cache.alias:
        v_side = k_side.head(att.v_head_dim)
    else:
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
    answers: dict[str, Any] = rules.answers | {
        "values": False,
        "ragged": ragged,
        "rows": rows,
        "soft": "H" if folded else "M",
        "fold_rows": folded,
        "lookup": lookup,
        "ahead": schedule["ids"] == "ahead",
        "ignored": ignored(op, spec, ragged, rules, valued=False),
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
        "aliased": spec.cache.alias,
        "turning": turning_for(spec, k_side, codec.k, qk.compute, target) if turned else None,
        "v_of_k": widen_text(qk.compute, pv.compute, target),
        "word_strides": [t.stride_name for n in worded for t in addresses[n].terms if t.stride is None],
        "qk": qk,
        "pv": pv,
        "k_fold": fold["k"],
        "v_fold": fold["v"],
        "v_scaled": spec.cache.v.fmt.scaled,  # then V holds no infinities
        # Weights times V's scale can leave f16's range: they are counted in units of the largest scale.
        "v_unit": fold["v"].site == "weight_column" and pv.compute == "f16",
        # Codes are finite unless e4m3 has its scales given; a scale that is not finite is masked with its
        # weight.
        "wild": bool(mask.by_row) and (not spec.cache.v.fmt.scaled or _nan_codes(spec)),
        "sum_late": op == "decode",
        "unroll": schedule.int("unroll") if op == "decode" and not mask.never_full else 1,
        "edges": loads_of_edges(op, spec, schedule, mask),
        "bf16_casts_used": needs_casts(target, att.q_dtype, spec.cache.k.format, spec.cache.v.format),
        # Quotients by a power of two are shifts, which the compiler repeats rather than keeps.
        "again": ragged and (att.group & (att.group - 1) != 0 or (op == "prefill" and rules.crowded)),
        "token_of_row": "row_M" if att.group == 1 else "row_M // GROUP",
        "head_of_row": head_of_row(att.group, ragged),
        "row_tiles": 1 if ragged else -(-att.group // rows),
        "live": live,
        "to_out": partial(store_text, dtype=att.q_dtype, target=target),
        "rescues_e4m3": bool(mask.by_row) and _nan_codes(spec),
        "v_widen": "e4m3_to_f16({}).to(tl.float32)"
        if _nan_codes(spec)
        else widen_text(spec.cache.v.fmt.storage, "f32", target),
        "out_widen": widen_text(att.q_dtype, "f32", target),
        "stored_f32": partial(store_text, dtype="f32", target=target),
        "summary": summary(spec, op, rules.words),
        "kernels": entries(op, args, schedule, ragged, codec, rules.read, rules.merged),
    }
    constants = []
    if codec.q == "digits":
        constants.append(Constant("DIGIT", codec.digit, "low digits per high digit of q"))
    constants += kernel_constants(op, spec, schedule, target, answers, rules)
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
    return found | {n: max(1, found[n] // readers[n].word) for n in spec.cache.fields}


def _nan_codes(spec: Spec) -> bool:
    """Whether a code of V may stand for NaN."""
    v = spec.cache.v
    return v.format == "e4m3" and v.static_scale
