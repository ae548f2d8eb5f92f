"""The shape of a model: what its config.json says about each layer's attention, and why some are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.models.families import FAMILIES, FEATURES, Family

FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE kinds whose angles depend on the position alone. Others look at the longest request of the batch."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of ``layer_types`` that are served."""


@dataclass(frozen=True)
class LayerShape:
    """The attention of a layer, as the fields of a spec. Layers of equal shapes share their kernels."""

    q_heads: int
    kv_heads: int
    head_dim: int
    """Elements of a row of K as it is cached: of a latent and its rotated part where ``latent``."""
    v_head_dim: int
    """Elements of a row of V as it is cached: of a latent where ``latent``."""
    scale: float
    window: int | None = None
    """Earlier keys kept beside a query's own: one less than a config's ``sliding_window``."""
    soft_cap: float | None = None
    sink: bool = False
    """Whether each head has a learned logit beside its keys."""
    latent: bool = False
    """MLA: one row for all heads, whose first ``v_head_dim`` elements are V as well."""


@dataclass(frozen=True)
class ModelShape:
    """What the runtime needs to know of a model."""

    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_positions: int

    @property
    def kinds(self) -> tuple[LayerShape, ...]:
        """The different layers, in the order of their first use."""
        return tuple(dict.fromkeys(self.layers))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; ``ArgumentError`` where there is none."""
    path = folder / "config.json"
    hint = f"give the folder of a checkpoint ({', '.join(FAMILIES)})"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(f"{folder}: no config.json; {hint}") from None
    except ValueError as error:
        raise ArgumentError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ArgumentError(f"{path}: not a JSON object; {hint}")
    return config


def check_supported(config: dict[str, Any], folder: Path) -> None:
    """Raise ``UnsupportedError`` with the reason for a model that kvgen cannot serve."""
    for found in _obstacles(config):
        raise UnsupportedError(f"{folder}: {found}; kvgen runs {', '.join(FAMILIES)} checkpoints")


def _obstacles(config: dict[str, Any]) -> list[str]:
    """Why a model cannot run, the most telling reason first."""
    given = {key: value for key, value in config.items() if value not in (None, False, 0, [], {})}
    family = FAMILIES.get(str(config.get("model_type")))
    name = json.dumps(config.get("model_type"))
    found = []
    if family is None:
        found.append(f"model_type = {name} is not supported")
    if not config.get("use_sliding_window", True):
        given.pop("sliding_window", None)
    kinds = sorted({str(kind) for kind in given.get("layer_types", ())} - set(LAYER_TYPES))
    if kinds:
        found.append(f"layer_types: {', '.join(kinds)}, and only {' and '.join(LAYER_TYPES)} are served")
    for key, what in FEATURES.items():
        plain = key == "layer_types" and set(given.get(key, ())) == {"full_attention"}
        if family and key in given and key not in family.features and not plain:
            value = json.dumps(given[key])
            found.append(f"{key} = {value}: {what}, which transformers' code for {name} does not have")
    if "use_bidirectional_attention" in given:
        found.append("use_bidirectional_attention: an engine computes prompts in chunks, which is causal")
    if "quantization_config" in given:
        found.append("quantization_config: weights must be plain f32, f16 or bf16")
    for rope in rope_kinds(config):
        if rope not in FIXED_ROPE:
            found.append(f"RoPE of kind {rope}: its angles change with the length of the batch")
    return found


def rope_kinds(config: dict[str, Any]) -> list[str]:
    """The names of the RoPE scalings, under any of the keys that transformers has used; one a layer type."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    tables = [table for table in scaling.values() if isinstance(table, dict)] or [scaling]
    return [str(table.get("rope_type") or table.get("type") or "default") for table in tables]


def shape_of(config: dict[str, Any], folder: Path) -> ModelShape:
    """The shape that config.json gives, with transformers' defaults for what it leaves out.

    ``ArgumentError`` names a field that is missing or no count. Give what ``check_supported`` passed.
    """
    family = FAMILIES[config["model_type"]]
    for key in ("num_attention_heads", "num_hidden_layers"):
        _count(config.get(key), key, folder)  # transformers' default would be another model's
    whole = family.config(config, folder)

    def count(key: str) -> int:
        return _count(getattr(whole, key, None), key, folder)

    layers = tuple(_layer(family, whole, at, count) for at in range(count("num_hidden_layers")))
    return ModelShape(layers, count("vocab_size"), count("max_position_embeddings"))


def _layer(family: Family, config: Any, at: int, count: Any) -> LayerShape:
    heads, has = count("num_attention_heads"), family.features.__contains__
    window = config.sliding_window if has("sliding_window") else None
    if has("layer_types") and config.layer_types[at] == "full_attention":
        window = None
    if has("kv_lora_rank"):
        rank, rotated = count("kv_lora_rank"), count("qk_rope_head_dim")
        scale = (count("qk_nope_head_dim") + rotated) ** -0.5 * family.rope_gain(config)
        return LayerShape(heads, 1, rank + rotated, rank, scale, latent=True)
    width = count("head_dim") if getattr(config, "head_dim", None) else count("hidden_size") // heads
    return LayerShape(
        q_heads=heads,
        kv_heads=count("num_key_value_heads"),
        head_dim=width,
        v_head_dim=width,
        scale=float(config.query_pre_attn_scalar if has("query_pre_attn_scalar") else width) ** -0.5,
        window=None if window is None else window - 1,
        soft_cap=config.attn_logit_softcapping if has("attn_logit_softcapping") else None,
        sink=has("sinks"),
    )


def _count(value: Any, key: str, folder: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{folder}: config.json: {key} = {value!r}; give a positive integer")
    return value
