"""The JSON Schema of a spec file, for editors: every rule is read off ``passes.fields``, none is restated.

A schema accepts a little more than ``load_spec``: what only several fields together show (a layout that
names every dimension, blocks that divide) is beyond JSON Schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.ir.quant import D_BLOCK_STEP, GROUPS
from kvgen.passes import fields
from kvgen.passes.fields import REQUIRED, Field


def spec_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of the TOML file as editors see it."""
    quant = _table(fields.QUANT)
    quant["properties"]["group"] |= {
        "additionalProperties": False,
        "properties": {
            dim: {"type": "integer", "minimum": D_BLOCK_STEP, "multipleOf": D_BLOCK_STEP}
            if dim == "d"
            else {"const": 1}
            for dims in GROUPS
            for dim in dims
        },
    }
    cache = _table(fields.CACHE, {"k": quant, "v": quant})
    top = _table(fields.TOP, {"attention": _table(fields.ATTENTION), "cache": cache})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvgen spec", **top}


def _table(rules: Mapping[str, Field], inner: Mapping[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    inner = inner or {}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [name for name, rule in rules.items() if rule.default is REQUIRED],
        "properties": {name: inner.get(name) or _property(rule) for name, rule in rules.items()},
    }


def _property(rule: Field) -> dict[str, Any]:
    found = {"description": rule.hint, **rule.check.schema}
    if rule.default is not REQUIRED and rule.default is not None:
        found["default"] = rule.default
    return found
