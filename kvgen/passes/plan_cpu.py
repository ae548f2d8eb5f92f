"""plan for the CPU backend: specs + schedule + target -> KernelPlan for a C++ template.

The layout string decides how rows are read: where d is contiguous in a page, vectors run along d in
place; where it is not, a tile's rows are staged. No template decides anything of this.
"""

from __future__ import annotations

from typing import Any

from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import Arg, Constant, KernelPlan
from kvgen.passes.abi import check_variant, op_args
from kvgen.passes.cpu_attention import LOG2E, Answers, Inputs
from kvgen.passes.cpu_codec import append_answers, gather_answers
from kvgen.passes.cpu_decode import decode_answers
from kvgen.passes.cpu_prefill import prefill_answers
from kvgen.passes.cpu_text import C_TYPES, SCALAR_HELPERS, SCALE_HELPERS, from_f32, reading, to_f32, writing
from kvgen.passes.lower import address_facts, lower_addresses, plane_units, stride_constants


def plan_cpu(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str = ""
) -> KernelPlan:
    """The lowered CPU kernel of ``op``.

    ``variant``: decode ``single``, ``multi``, ``prefix``; append, gather, merge the type outside the cache.
    Defaults: ``single`` and the query's type. ``UnsupportedError`` for an unknown variant.
    """
    variant = check_variant(op, variant, spec)
    addresses = lower_addresses(spec, record)
    att = spec.attention
    constants = [
        Constant("Q_HEADS", att.q_heads),
        Constant("KV_HEADS", att.kv_heads),
        Constant("HEAD_DIM", att.head_dim),
        Constant("V_HEAD_DIM", att.v_head_dim),
        Constant("PAGE", spec.cache.page_size, "tokens in a page"),
    ]
    more, answers = _ANSWERS[op](Inputs(spec, record, schedule, target, variant, addresses))
    used = set(_CONSTANTS_OF[op])
    if spec.cache.alias and op in ("append", "gather"):
        used.remove("V_HEAD_DIM")  # only K's rows move
    if op == "gather" and variant == "f32" and spec.cache.raw is None:
        # Rows of segments are read piece by piece, into their place.
        used -= {n for side, n in (("k", "HEAD_DIM"), ("v", "V_HEAD_DIM")) if spec.cache.quant(side).segments}
    constants = [c for c in constants if c.name in used] + list(more)
    if op not in ("copy", "merge"):
        constants += stride_constants(addresses, plane_units(record))
    return KernelPlan(
        op=op,
        variant=variant,
        template=f"cpp/{op}.cpp.jinja",
        spec=spec,
        target=target,
        schedule=schedule,
        record=record,
        args=op_args(op, spec, record, variant),
        constants=tuple(constants),
        addresses=addresses,
        facts=address_facts(record, addresses),
        answers={
            "c_type": _arg_type,
            "isa_file": f"cpp/_isa_{target.arch}.jinja",
            "scalar_helpers": SCALAR_HELPERS,
            "scale_helpers": SCALE_HELPERS,
            "includes": _includes(op, target),
            **answers,
        },
        ignored=tuple(answers.get("ignored", ())),
    )


_CONSTANTS_OF = {
    "append": ("KV_HEADS", "HEAD_DIM", "V_HEAD_DIM", "PAGE"),
    "decode": ("Q_HEADS", "KV_HEADS", "HEAD_DIM", "V_HEAD_DIM", "PAGE"),
    "prefill": ("KV_HEADS", "HEAD_DIM", "V_HEAD_DIM", "PAGE"),
    "merge": ("Q_HEADS", "V_HEAD_DIM"),
    "copy": (),
    "gather": ("KV_HEADS", "HEAD_DIM", "V_HEAD_DIM", "PAGE"),
}


def _arg_type(arg: Arg) -> str:
    """C++ type of an argument; inputs are not const because one struct serves readers and writers."""
    if arg.kind == "ptr":
        return f"{C_TYPES[arg.dtype]}*"
    return "double" if arg.kind == "f64" else "int64_t"


def _includes(op: str, target: Target) -> tuple[str, ...]:
    headers = ["algorithm", "cmath", "cstdint", "cstring"]
    if op in ("decode", "prefill"):
        headers.append("omp.h")
    if op == "append":
        headers.append("vector")
    return tuple(headers + (["immintrin.h"] if target.arch != "portable" else []))


def _merge(given: Inputs) -> Answers:
    sink = given.spec.attention.sink
    constants = (Constant("LOG2E", LOG2E, "natural units to those of base 2"),) if sink else ()
    return constants, {
        "sink": sink,
        "io_type": C_TYPES[given.variant],
        "read": to_f32(given.variant, "out[d]"),
        "write": from_f32(given.variant, "no_infinity(row[d] * factor)"),
        "helper_names": sorted(reading(given.variant) | writing(given.variant) | {"no_infinity"}),
    }


def _copy(given: Inputs) -> Answers:
    return (), {"planes": [_copy_plane(plane) for plane in given.record.planes], "helper_names": []}


def _copy_plane(plane: Any) -> dict[str, Any]:
    """The loops over axes that are not contiguous, and the elements of the run inside them."""
    run, inside = 1, list(plane.inside)
    while inside and inside[-1].stride.fixed == run * plane.itemsize:
        run *= inside.pop().extent
    loops = [
        {
            "name": placed.axis.key,
            "extent": placed.extent,
            "stride": placed.stride.fixed // plane.itemsize
            if placed.constant
            else f"a.{plane.name}_stride_{placed.axis.key}",
        }
        for placed in (*plane.outside, *inside)
    ]
    return {"name": plane.name, "type": C_TYPES[plane.dtype], "run": run, "loops": loops}


_ANSWERS = {
    "append": append_answers,
    "decode": decode_answers,
    "prefill": prefill_answers,
    "merge": _merge,
    "copy": _copy,
    "gather": gather_answers,
}
