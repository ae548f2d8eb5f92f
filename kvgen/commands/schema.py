"""The JSON Schema of a spec file, for editors: every rule is read off ``passes.fields`` and the registry of
``kvgen.variants``, none is restated.

A schema accepts a little more than ``load_spec``: what only several fields together show (a layout that
names every dimension, blocks that divide) is beyond JSON Schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.ir.attention import PARAM_DIMS
from kvgen.ir.quant import D_BLOCK_STEP
from kvgen.passes import fields
from kvgen.passes.fields import REQUIRED, Field
from kvgen.variants import attention_fields, positions


def spec_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of the TOML file as editors see it."""
    quant = _quant()
    alias = _table(fields.ALIAS)
    cache = _table(fields.CACHE, {"k": quant, "v": {"type": "object", "oneOf": [quant, alias]}})
    param = _table(fields.PARAM)
    param["properties"]["dims"] |= {"items": {"enum": list(PARAM_DIMS)}, "uniqueItems": True, "minItems": 1}
    params = {"type": "object", "additionalProperties": param, "description": fields.ATTENTION["params"].hint}
    inner = {"params": params, "rope": _rope()}
    top = _table(fields.TOP, {"attention": _table(attention_fields(), inner), "cache": cache})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvgen spec", **top}


def _quant() -> dict[str, Any]:
    """Keys of one side: a format, or segments that each have one."""
    quant = _table(fields.quant_fields())
    block = {
        "type": "integer",
        "anyOf": [{"const": 1}, {"minimum": D_BLOCK_STEP, "multipleOf": D_BLOCK_STEP}],
    }
    blocks = {"head": {"const": 1}, "tok": {"type": "integer", "minimum": 1}, "d": block}
    quant["properties"]["group"] |= {"additionalProperties": False, "properties": blocks}
    quant["properties"]["levels"] |= {"items": {"type": "number"}, "minItems": 3, "maxItems": 16}
    size = {"type": "integer", "minimum": 16, "multipleOf": 16}
    segment = {**quant, "properties": {"size": size, **quant["properties"]}, "required": ["size", "format"]}
    segments = {"type": "array", "items": segment, "minItems": 2, "maxItems": 8}
    rest = {key: quant["properties"][key] for key in ("scales", "layout")}
    cut = {**quant, "properties": {"segments": segments, **rest}, "required": ["segments"]}
    return {"type": "object", "oneOf": [quant, cut]}


def _rope() -> dict[str, Any]:
    """The common keys, with those of each position scheme where its kind is chosen."""
    schemes = positions()
    found = _table(
        fields.ROPE | {name: rule for scheme in schemes.values() for name, rule in scheme.fields.items()}
    )
    found["required"] = []
    found["properties"]["kind"]["enum"] = list(schemes)
    found["allOf"] = [
        {
            "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
            "then": {"required": [key for key, rule in scheme.fields.items() if rule.default is REQUIRED]},
        }
        for name, scheme in schemes.items()
    ]
    return found


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
