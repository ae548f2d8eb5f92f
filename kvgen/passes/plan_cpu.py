"""plan for the CPU backend: specs + schedule + target -> KernelPlan for a C++ template.

The layout string decides how rows are read: where d is contiguous in a page, vectors run along d in
place; where it is not, a tile's rows are staged. No template decides anything of this.
"""

from __future__ import annotations

from typing import Any

from kvgen.ir import PageRecord, Schedule, Spec, Target, rules
from kvgen.ir.plan import Arg, Constant, KernelPlan
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.passes.abi import check_variant, op_args
from kvgen.passes.cpu_attention import Answers, Inputs, attention_answers
from kvgen.passes.cpu_text import C_TYPES, SCALAR_HELPERS, from_f32, reading, to_f32, writing
from kvgen.passes.lower import address_facts, lower_addresses, stride_constants


def plan_cpu(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, variant: str = ""
) -> KernelPlan:
    """The lowered CPU kernel of ``op``.

    ``variant``: decode ``single`` or ``multi``; append, gather and merge the type outside the cache.
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
    constants = [c for c in constants if c.name in used] + list(more)
    if op not in ("copy", "merge"):
        constants += stride_constants(addresses)
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
            "includes": _includes(op, target),
            **answers,
        },
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


def _field(given: Inputs, side: str) -> dict[str, Any]:
    """What append and gather ask about K or V."""
    quant, addresses = given.spec.cache.quant(side), given.addresses
    scale = f"{side}_scale"
    found: dict[str, Any] = {
        "type": C_TYPES[quant.fmt.storage],
        "width": "HEAD_DIM" if side == "k" else "V_HEAD_DIM",
        "address": addresses[side],
        "scaled": quant.fmt.scaled,
        "static": quant.static_scale,
        "qmax": quant.fmt.qmax,
    }
    if quant.fmt.scaled:
        found["scale_address"] = addresses[scale]
        at = addresses[scale].c(page="page", tok="tok", head="head")
        found["scale"] = f"a.{scale}[{at}]"
    return found


def _append(given: Inputs) -> Answers:
    fields = {side: _field(given, side) for side in ("k", "v")}
    helpers: set[str] = set()
    for side, found in fields.items():
        fmt = given.spec.cache.quant(side).fmt
        found["read"] = to_f32(given.variant, "x[d]")
        if fmt.scaled:
            found["codec"] = "scale"
            helpers |= reading(given.variant)
        elif fmt.storage == given.variant:
            found["codec"] = "copy"
        else:
            found["codec"] = "convert"
            found["convert"] = from_f32(fmt.storage, found["read"])
            helpers |= reading(given.variant) | writing(fmt.storage)
    quants = (given.spec.cache.k, given.spec.cache.v)
    more = [Constant("PARALLEL_ROWS", given.schedule.int("parallel_rows"), "rows from which threads pay")]
    dynamic = any(q.fmt.scaled and not q.static_scale for q in quants)
    if dynamic:
        more.append(Constant("SMALLEST_AMAX", ZERO_BLOCK_AMAX, "a block below this is zero"))
    return tuple(more), {
        "k_field": fields["k"],
        "v_field": fields["v"],
        "in_type": C_TYPES[given.variant],
        "quantised": any(q.fmt.scaled for q in quants),
        "dynamic_scales": dynamic,
        "rules": rules,
        "helper_names": sorted(helpers),
    }


def _gather(given: Inputs) -> Answers:
    fields = {side: _field(given, side) for side in ("k", "v")}
    helpers: set[str] = set()
    for side, found in fields.items():
        storage = given.spec.cache.quant(side).fmt.storage
        element = f"row[{given.addresses[side].c(d='d')}]"
        if storage == given.variant:
            found["convert"] = element
        else:
            value = to_f32(storage, element) + (" * scale" if found["scaled"] else "")
            found["convert"] = from_f32(given.variant, value)
            helpers |= reading(storage) | writing(given.variant)
    return (), {
        "k_field": fields["k"],
        "v_field": fields["v"],
        "out_type": C_TYPES[given.variant],
        "quantised": given.spec.cache.k.fmt.scaled or given.spec.cache.v.fmt.scaled,
        "helper_names": sorted(helpers),
    }


def _merge(given: Inputs) -> Answers:
    return (), {
        "io_type": C_TYPES[given.variant],
        "read": to_f32(given.variant, "out[d]"),
        "write": from_f32(given.variant, "row[d] * factor"),
        "helper_names": sorted(reading(given.variant) | writing(given.variant)),
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
    "append": _append,
    "decode": attention_answers,
    "prefill": attention_answers,
    "merge": _merge,
    "copy": _copy,
    "gather": _gather,
}
