"""What masks, scores and the sink of a spec ask of one attention kernel: texts, parameters, constants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvgen.ir import Spec
from kvgen.ir.expression import names_of
from kvgen.ir.plan import Constant
from kvgen.passes.abi import PREFIX, ROPE_TABLE, param_args
from kvgen.passes.plan_triton_mask import Mask, mask_for, merge_ranges, segments
from kvgen.passes.plan_triton_parts import LONGEST
from kvgen.passes.plan_triton_score import score_for
from kvgen.passes.plan_triton_terms import Printer, Rows
from kvgen.passes.print_helpers import HELPERS
from kvgen.passes.terms import masking, scoring

SINK = "sink_logit"


@dataclass(frozen=True)
class Rules:
    """The rules of one kernel (of two, for decode)."""

    mask: Mask
    folds: bool
    """Whether the softmax can run on 8 rows: a predicate that differs by head keeps rows apart."""
    folded: bool
    """Whether it does."""
    crowded: bool
    """Whether masked tiles need more registers than causal ones."""
    answers: dict[str, Any]
    """For the templates."""
    constants: tuple[Constant, ...]
    words: tuple[str, ...]
    """For the header."""
    read: frozenset[str]
    """Arguments of parameters that the first kernel reads."""
    merged: frozenset[str]
    """Those that the merge of decode reads."""


def rules_for(op: str, spec: Spec, variant: str, *, foldable: bool, live: bool) -> Rules:
    """The rules of ``op``. ``foldable``: its rows may be folded; ``live``: some rows of a tile may not exist.

    Raises UnsupportedError for masks and scores that a shared prefix cannot have.
    """
    att, ragged = spec.attention, op == "prefill" or variant != "single"
    prefix = variant == PREFIX
    masks = masking(spec, single=not ragged, prefix=prefix)
    scores = scoring(spec)
    sink = att.sink and not prefix
    params = {param.name: param for param in att.params}
    folds = masks.predicate is None or "head" not in names_of(masks.predicate)
    folded = foldable and folds
    suffix = "H" if folded else "M"
    printer = Printer(
        Rows(suffix, ragged, f"live_{suffix}" if (att.group < 8 if folded else live) else ""), params
    )
    merger = Printer(Rows("R", ragged, "live_R"), params)
    mask = mask_for(masks, printer)
    mask_vectors = tuple(printer.vectors)
    score = score_for(scores, printer)
    answers: dict[str, Any] = {
        "mask": mask,
        "segments": segments(mask),
        "score": score,
        "request_lines": tuple(printer.requests),
        "row_lines": tuple(printer.vectors),
        "named": frozenset(printer.names),
        "live_rows": printer.rows.live,
        "sink": sink,
        "sink_here": sink and op == "prefill",
    }
    if op == "decode":
        answers |= merge_ranges(masks, merger)
        answers |= {
            "merge_lines": (*merger.requests, *merger.vectors),
            "merge_named": frozenset(merger.names),
        }
    called = printer.helpers | merger.helpers
    answers["term_helpers"] = tuple(helper.triton for name, helper in HELPERS.items() if name in called)
    constants = [
        replace(c, value=min(c.value, LONGEST - 1)) if isinstance(c.value, int) else c
        for c in (*masks.constants, *(scores.constants if scores else ()))
        if c.name in printer.names | merger.names
    ]
    if sink:
        constants.append(Constant("LOG2E", 1.4426950408889634, "base-2 units of a natural one"))
    words = (*masks.words, *(scores.words if scores else ()), *(("a sink for each head",) if sink else ()))
    read = printer.read | ({SINK} if sink and op == "prefill" else set())
    merged = merger.read | ({SINK} if sink and op == "decode" else set())
    turned = (ROPE_TABLE,) if att.rope and att.rope.stored == "pre" else ()
    return Rules(
        mask=mask,
        folds=folds,
        folded=folded,
        crowded=mask.peels_front or bool(mask.loads or mask_vectors or sink),
        answers=answers,
        constants=tuple(dict.fromkeys(constants)),
        words=words,
        read=frozenset(arg.name for arg in param_args((*(params[name] for name in sorted(read)), *turned))),
        merged=frozenset(arg.name for arg in param_args(params[name] for name in sorted(merged))),
    )
