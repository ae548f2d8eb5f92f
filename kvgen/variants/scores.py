"""Score terms, in natural units, applied to scale * q.k in their order; and the sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgen.ir import Param
from kvgen.ir.plan import Constant
from kvgen.passes.fields import EXPRESSION, SWITCH, Check, Field, number
from kvgen.variants.registry import Definition, Formula

if TYPE_CHECKING:
    from kvgen.variants.draw import Draw

OFF = "true, or leave it out"


def _alibi(value: Any, q_heads: int) -> Formula:
    """Slopes of the paper: a geometric series; for a number of heads that is no power of two, that of the
    next lower one, and then every second of twice as many."""
    table = {"heads": q_heads, "offset": 0} | (dict(value) if isinstance(value, tuple) else {})
    heads, offset = int(table["heads"]), int(table["offset"])
    power = 1 << (heads.bit_length() - 1)
    constants = [Constant("SLOPE_HEADS", power, "heads of the first series of slopes")]
    index = f"(head + {offset})" if offset else "head"
    series = f"exp2(-8.0 * ({index} + 1) / SLOPE_HEADS)"
    if power != heads and offset + q_heads > power:
        second = f"exp2(-4.0 * (2 * ({index} - SLOPE_HEADS) + 1) / SLOPE_HEADS)"
        series = f"where({index} < SLOPE_HEADS, {series}, {second})"
    return Formula(f"score - {series} * abs(q_pos - kv_pos)", tuple(constants))


def _alibi_value(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if not isinstance(value, dict) or set(value) != {"heads", "offset"}:
        return "neither true nor a table of heads and offset"
    good = all(type(n) is int and 0 <= n <= 65536 for n in value.values()) and value["heads"] > 0
    return None if good else "heads (from 1) and offset (from 0) are integers up to 65536"


def _slopes(param: Param, draw: Draw) -> Any:
    return draw.rng.random(draw.shape(param)) + 0.5


def _sinks(param: Param, draw: Draw) -> Any:
    return 3 * draw.rng.standard_normal(draw.shape(param))


SCORES = (
    Definition(
        "head_scale",
        "score",
        Field(SWITCH, OFF, None),
        "a factor for each head",
        "FlexAttention; per-head temperature",
        lambda value, q_heads: Formula(
            "score * head_scale[head]", params=(Param("head_scale", ("head",), "f32"),)
        ),
        {"head_scale": True},
        order=10,
        sample=_slopes,
        words="a scale for each head",
    ),
    Definition(
        "alibi",
        "score",
        Field(
            Check(
                _alibi_value,
                {
                    "anyOf": [
                        {"type": "boolean"},
                        {
                            "type": "object",
                            "required": ["heads", "offset"],
                            "additionalProperties": False,
                            "properties": {
                                "heads": {"type": "integer", "minimum": 1},
                                "offset": {"type": "integer", "minimum": 0},
                            },
                        },
                    ]
                },
            ),
            "true, or { heads = 64, offset = 32 }: heads of the whole model, and the first of them here",
            None,
        ),
        "a slope for each head times the distance",
        "Press et al. 2022",
        _alibi,
        {"alibi": True},
        order=20,
        words="ALiBi",
    ),
    Definition(
        "score",
        "score",
        Field(EXPRESSION, "for example 'score - slope[head] * abs(q_pos - kv_pos)'", None),
        "an expression of your own (docs/variants.md)",
        "FlexAttention's score_mod",
        lambda value, q_heads: Formula(value),
        {"score": "score - 0.125 * sqrt(float(abs(q_pos - kv_pos)))"},
        order=60,
        words="{value}",
    ),
    Definition(
        "soft_cap",
        "score",
        # Kernels multiply by the cap and by its inverse.
        Field(number(2.0**-60, 2.0**60), "for example 50.0, or leave it out", None),
        "cap * tanh(score / cap)",
        "Gemma 2",
        lambda value, q_heads: Formula(
            "CAP * tanh(score / CAP)", (Constant("CAP", float(value), "largest magnitude of a score"),)
        ),
        {"soft_cap": 20.0},
        order=90,
        words="soft cap at {value}",
    ),
    Definition(
        "sink_logit",
        "sink",
        Field(SWITCH, OFF, None),
        "a learned logit for each head that takes weight and has no value",
        "gpt-oss; Xiao et al. 2024 (StreamingLLM)",
        lambda value, q_heads: Formula("", params=(Param("sink_logit", ("head",), "f32"),)),
        {"sink_logit": True},
        order=95,
        sample=_sinks,
        words="a sink for each head",
    ),
)
