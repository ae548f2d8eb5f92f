"""plan for Triton: op + spec + schedule + target -> KernelPlan, everything that a template prints decided.

The parts live in ``plan_triton_*``: ``codec`` (how codes become operands), ``words`` (bytes read in pairs),
``types`` (what dots compute in), ``parts`` (d-parts, parameters), ``tiles`` (loads and their operands),
``pages`` (page lookup and pointers), ``terms`` (printed expressions and what they load), ``mask`` (ranges and
predicates), ``score``, ``rules`` (what all of these ask of a kernel), ``kernels`` (parameters, rows),
``attention`` (decode, prefill) and ``rows`` (append, merge, copy, gather).
"""

from __future__ import annotations

from typing import Any

from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import Constant, Fact, KernelPlan
from kvgen.passes.abi import check_variant, op_args
from kvgen.passes.lower import address_facts, lower_addresses, plane_units, stride_constants
from kvgen.passes.plan_triton_attention import attention_answers
from kvgen.passes.plan_triton_parts import aligned
from kvgen.passes.plan_triton_rows import row_answers
from kvgen.passes.plan_triton_unturned import aligned_table


def plan_triton(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str = ""
) -> KernelPlan:
    """The plan of one op. Raises UnsupportedError for an op, variant or schedule that has no kernel."""
    variant = check_variant(op, variant, spec)
    addresses = dict(lower_addresses(spec, record))
    args = tuple(arg for arg in op_args(op, spec, record, variant) if arg.name != "num_threads")
    answers: dict[str, Any]
    constants: tuple[Constant, ...]
    facts: tuple[Fact, ...]
    if op in ("decode", "prefill"):
        answers, constants, facts = attention_answers(
            op, spec, record, schedule, target, variant, addresses, args
        )
    else:
        answers, constants, facts = row_answers(op, spec, record, schedule, target, variant, args)
    units = plane_units(record) | dict.fromkeys(answers.get("worded", ()), "words")
    strides = () if op in ("merge", "copy") else stride_constants(addresses, units)
    if op in ("decode", "prefill") and spec.cache.page_size == 1:
        # The only token of a page stands at its start.
        strides = tuple(c for c in strides if not c.name.endswith("_STRIDE_TOK"))
    promised = aligned(spec, record) | (aligned_table(spec) if op in ("decode", "prefill") else frozenset())
    return KernelPlan(
        op=op,
        variant=variant,
        template=f"triton/{op}.py.jinja",
        spec=spec,
        target=target,
        schedule=schedule,
        record=record,
        args=args,
        constants=(*constants, *strides),
        addresses=addresses,
        facts=(*address_facts(record, addresses), *facts),
        answers={**answers, "aligned": promised},
        ignored=tuple(answers.get("ignored", ())),
    )
