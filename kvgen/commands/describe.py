"""Values of the IR as plain data: what ``--json`` prints and ``manifest.json`` holds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from kvgen.ir import AttentionSpec, Extent, PageRecord, Param, Plane, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.ir.quant import DTYPE_BYTES


def spec_data(spec: Spec) -> dict[str, Any]:
    """The spec with its identity; ``spec`` inside reads back through ``kvgen.load_spec``."""
    return {"name": spec.name, "hash": spec.hash, "hash8": spec.hash8, "spec": spec.to_dict()}


def term_data(att: AttentionSpec) -> list[dict[str, Any]]:
    """The masks, score terms and sink that a spec switches on, in the order in which they apply."""
    from kvgen.variants import definitions, switched_on

    chosen = [(d, att.option(d.name)) for d in definitions()]
    return [
        {
            "kind": found.kind,
            "key": found.name,
            "value": plain(value),
            "what": found.words.format(name=found.name, value=value),
            "text": found.formula(value, att.q_heads).text,
            "params": [param_text(param) for param in found.formula(value, att.q_heads).params],
        }
        for found, value in chosen
        if switched_on(value)
    ]


def param_text(param: Param) -> str:
    """``slope [head] f32``."""
    return f"{param.name} [{', '.join(param.dims)}] {param.dtype}"


def toml_text(value: Any) -> str:
    """A value as a spec file holds it: ``true``, ``"bits"``, ``{ heads = 64 }``."""
    if isinstance(value, dict) and value:
        return f"{{ {', '.join(f'{key} = {toml_text(item)}' for key, item in value.items())} }}"
    return json.dumps(value)


def record_data(record: PageRecord) -> dict[str, Any]:
    """Offsets, strides and sizes in bytes. ``{"fixed": f, "per_page": p}`` is f + p * num_pages."""
    return {
        "align": record.align,
        "page_bytes": record.page_bytes(),
        "pools": [{"name": name, "bytes": extent_data(size)} for name, size in record.pools],
        "planes": [plane_data(plane) for plane in record.planes],
        **({"raw": [plane_data(plane) for plane in record.raw]} if record.raw else {}),
    }


def plane_data(plane: Plane) -> dict[str, Any]:
    """One plane; axes outermost first, as the axes of its tensor."""
    return {
        "name": plane.name,
        "dtype": plane.dtype,
        "itemsize": plane.itemsize,
        "pool": plane.pool,
        "offset": extent_data(plane.offset),
        "page_payload": payload(plane),
        "axes": [
            {
                "axis": str(placed.axis),
                "extent": "num_pages" if placed.extent is None else placed.extent,
                "stride": extent_data(placed.stride),
                "constant": placed.constant,
            }
            for placed in plane.axes
        ],
    }


def extent_data(extent: Extent) -> dict[str, int]:
    """A byte count that may grow with the pool."""
    return {"fixed": extent.fixed, "per_page": extent.per_page}


def payload(plane: Plane) -> int:
    """Bytes of a plane's elements in one page, without padding."""
    return math.prod(a.extent for a in plane.axes if a.extent is not None) * plane.itemsize


def bytes_data(spec: Spec, record: PageRecord) -> dict[str, Any]:
    """What a page and a token of one layer cost, and what they would cost as bf16 without padding."""
    page = record.page_bytes()
    used = sum(map(payload, record.planes))
    att, tokens = spec.attention, spec.cache.page_size
    # V inside K's rows takes nothing of its own, in any format.
    elements = att.head_dim + (0 if spec.cache.alias else att.v_head_dim)
    bf16 = att.kv_heads * elements * DTYPE_BYTES["bf16"]
    return {
        "page": page,
        "payload": used,
        "padding": page - used,
        "padding_percent": round(100 * (page - used) / page, 2),
        "token": round(page / tokens, 2),
        "bf16_token": bf16,
        "smaller_than_bf16": round(bf16 * tokens / page, 3),
        **({"raw_row": record.raw_bytes()} if record.raw else {}),
    }


def target_data(target: Target) -> dict[str, Any]:
    """A target's facts; those that are unknown (0) or none are left out."""
    facts = dataclasses.asdict(target) | {"features": list(target.features)}
    return {name: value for name, value in facts.items() if value or name in ("name", "backend", "arch")}


def plan_data(plan: KernelPlan) -> dict[str, Any]:
    """Everything decided for one kernel."""
    return {
        "op": plan.op,
        "variant": plan.variant,
        "entry": plan.entry,
        "template": plan.template,
        "target": target_data(plan.target),
        "schedule": plan.schedule.to_dict(),
        "constants": [dataclasses.asdict(constant) for constant in plan.constants],
        "args": [dataclasses.asdict(arg) for arg in plan.args],
        "facts": [dataclasses.asdict(fact) for fact in plan.facts],
        "answers": plain(plan.answers),
    }


def plain(value: Any) -> Any:
    """Answers of a plan as JSON data: records become objects, functions and formulas their names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return getattr(value, "__name__", str(value))
