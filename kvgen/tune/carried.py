"""carried: what the names in a spec mean, for the process that runs candidates.

That process knows what kvgen brings and nothing else. What a user registered goes there as plain data: codecs
whole, masks, scores and sinks as the formula of the spec's value, position schemes as their frequencies. Only
sample values of parameters need the definition's own code, and are asked for.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvgen.ir import Param, Spec
from kvgen.ir.codec import CODECS, Codec, register
from kvgen.ir.meaning import OWN
from kvgen.ir.plan import Constant
from kvgen.passes.fields import Check, Field
from kvgen.variants import (
    Definition,
    Formula,
    Position,
    definition,
    definitions,
    positions,
    registry,
    switched_on,
)
from kvgen.variants.draw import Array, Draw

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Puts a question to the process that has the definitions, and returns its answer."""


def carried(spec: Spec) -> dict[str, Any]:
    """The definitions of ``spec`` that kvgen does not bring, as plain JSON data."""
    att = spec.attention
    formats = {part.quant.format for side in spec.cache.fields for part in spec.segments(side)}
    own = [d for d in definitions() if d.name in OWN and switched_on(att.option(d.name))]
    rope = att.rope if att.rope is not None and f"rope.{att.rope.kind}" in OWN else None
    return {
        "meanings": dict(spec.meanings),
        "codecs": [CODECS[name].to_dict() for name in sorted(formats) if not CODECS[name].built_in],
        "definitions": [
            {
                "name": d.name,
                "kind": d.kind,
                "order": d.order,
                "words": d.words,
                "sampled": d.sample is not None,
                "formula": dataclasses.asdict(d.formula(att.option(d.name), att.q_heads)),
            }
            for d in own
        ],
        "rope": [rope.kind, *positions()[rope.kind].frequencies(rope)] if rope is not None else None,
    }


def adopt(values: Mapping[str, Any], ask: Ask) -> None:
    """Register what ``carried`` returned; ``ask`` reaches who called it."""
    for codec in values["codecs"]:
        register(Codec.from_dict(codec))
    for found in values["definitions"]:
        registry.register(_definition(found, ask))
    if values["rope"] is not None:
        kind, steps, factor = values["rope"]
        registry.register(Position(kind, {}, "", "", lambda rope: (steps, factor)))


def _definition(found: Mapping[str, Any], ask: Ask) -> Definition:
    """A definition that has one formula, that of the value which the spec gives it."""
    raw = found["formula"]
    formula = Formula(
        raw["text"],
        tuple(Constant(**constant) for constant in raw["constants"]),
        tuple(Param(**{**param, "dims": tuple(param["dims"])}) for param in raw["params"]),
        raw["bounds"],
    )

    def sample(param: Param, draw: Draw) -> Array:
        question = {
            "sample": found["name"], "param": param.name, "heads": draw.heads, "kv": draw.kv,
            "kv_lens": draw.kv_lens.tolist(), "q_starts": draw.q_starts.tolist(),
            "seed": int(draw.rng.integers(1 << 31)),
        }  # fmt: skip
        data = base64.b64decode(ask(question)["values"])
        values: Array = np.load(io.BytesIO(data), allow_pickle=False)
        return values

    return Definition(
        found["name"],
        found["kind"],
        Field(Check(lambda value: None, {}), "", None),
        doc="",
        source="",
        formula=lambda value, q_heads: formula,
        example={},
        words=found["words"],
        order=found["order"],
        sample=sample if found["sampled"] else None,
    )


def answer(spec: Spec, question: Mapping[str, Any]) -> dict[str, Any]:
    """The sample values that the other process asks for, drawn by the definition itself."""
    found = definition(question["sample"])
    params = found.formula(spec.attention.option(found.name), spec.attention.q_heads).params
    (param,) = (param for param in params if param.name == question["param"])
    lens, starts = (np.asarray(question[name], np.int64) for name in ("kv_lens", "q_starts"))
    draw = Draw(question["heads"], lens, starts, question["kv"], np.random.default_rng(question["seed"]))
    assert found.sample is not None
    stream = io.BytesIO()
    np.save(stream, np.asarray(found.sample(param, draw)), allow_pickle=False)
    return {"values": base64.b64encode(stream.getvalue()).decode()}
