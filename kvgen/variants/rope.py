"""Schemes of rotary frequencies, as transformers' checkpoints name them (``rope_type``)."""

from __future__ import annotations

import math
from typing import Any

from kvgen.ir import RopeSpec
from kvgen.passes.fields import FACTOR, SWITCH, Field, integer
from kvgen.variants.registry import Position

FACTOR_FIELD = Field(FACTOR, "how many times longer contexts become, for example 8.0")
LENGTH = Field(integer(1, 2**31 - 1), "positions of the original training, for example 8192")


def plain(rope: RopeSpec) -> list[float]:
    """theta ** (-2i / dim)."""
    return [rope.theta ** (-2 * i / rope.dim) for i in range(rope.dim // 2)]


def _default(rope: RopeSpec) -> tuple[list[float], float]:
    return plain(rope), 1.0


def _linear(rope: RopeSpec) -> tuple[list[float], float]:
    factor = dict(rope.options)["factor"]
    return [f / factor for f in plain(rope)], 1.0


def _llama3(rope: RopeSpec) -> tuple[list[float], float]:
    """Long waves are stretched, short ones kept, those between interpolated."""
    given = dict(rope.options)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    found = []
    for frequency in plain(rope):
        turns = given["original_max_position_embeddings"] * frequency / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append((1 - keep) * frequency / given["factor"] + keep * frequency)
    return found, 1.0


def _yarn(rope: RopeSpec) -> tuple[list[float], float]:
    """Interpolation by wave length, and a temperature (Peng et al. 2023, as transformers computes it)."""
    given: dict[str, Any] = dict(rope.options)
    factor, length = given["factor"], given["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        return rope.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(given["beta_fast"]), index_of(given["beta_slow"])
    if given["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low or 0.001
    found = []
    for i, frequency in enumerate(plain(rope)):
        stretch = min(1.0, max(0.0, (i - low) / span))
        found.append(frequency / factor * stretch + frequency * (1 - stretch))
    return found, _temperature(given)


def _temperature(given: dict[str, Any]) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return of(given["mscale"]) / of(given["mscale_all_dim"])
    return of(1.0)


SCHEMES = (
    Position("default", {}, "theta ** (-2i / dim)", "Su et al. 2021 (RoFormer)", _default),
    Position(
        "linear",
        {"factor": FACTOR_FIELD},
        "all frequencies divided by factor",
        "Chen et al. 2023 (position interpolation)",
        _linear,
        {"factor": 4.0},
    ),
    Position(
        "llama3",
        {
            "factor": FACTOR_FIELD,
            "low_freq_factor": Field(FACTOR, "for example 1.0"),
            "high_freq_factor": Field(FACTOR, "for example 4.0"),
            "original_max_position_embeddings": LENGTH,
        },
        "low frequencies divided by factor, high ones kept",
        "Llama 3.1",
        _llama3,
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    Position(
        "yarn",
        {
            "factor": FACTOR_FIELD,
            "original_max_position_embeddings": LENGTH,
            "beta_fast": Field(FACTOR, "for example 32.0", 32.0),
            "beta_slow": Field(FACTOR, "for example 1.0", 1.0),
            "mscale": Field(FACTOR, "leave it out for the paper's temperature", None),
            "mscale_all_dim": Field(FACTOR, "leave it out for the paper's temperature", None),
            "attention_factor": Field(FACTOR, "leave it out for the paper's temperature", None),
            "truncate": Field(SWITCH, "whether the bounds of the ramp are integers", True),
        },
        "frequencies divided by factor where waves are long, with a temperature",
        "Peng et al. 2023 (YaRN)",
        _yarn,
        {"factor": 4.0, "original_max_position_embeddings": 4096},
    ),
)
