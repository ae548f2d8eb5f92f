"""The shape of a model, read from its config.json, and the spec of a cache for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError, Diagnostic, SpecError, UnsupportedError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec

MODEL_TYPES = ("llama",)
"""``model_type`` of the checkpoints whose attention a spec describes fully."""

FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE kinds whose angles depend on the position alone. Others look at the longest request of the batch."""

PAGES: dict[str, dict[str, Any]] = {
    "f32": {"format": "f32"},
    "bf16": {"format": "bf16"},
    "int8": {"format": "int8", "group": {"tok": 1, "head": 1}},
}
"""Storage of K and V by the short name that commands take; int8 has a scale for each token and head."""


@dataclass(frozen=True)
class ModelShape:
    """What the runtime needs to know of a model."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; ``ArgumentError`` where there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(f"{folder}: no config.json; give the folder of a Llama checkpoint") from None
    except ValueError as error:
        raise ArgumentError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ArgumentError(f"{path}: not a JSON object; give the folder of a Llama checkpoint")
    return config


def check_supported(config: dict[str, Any], folder: Path) -> None:
    """Raise ``UnsupportedError`` with the reason for a model that kvgen cannot serve."""
    for found in _obstacles(config):
        raise UnsupportedError(f"{folder}: {found}; kvgen runs {', '.join(MODEL_TYPES)} checkpoints")


def _obstacles(config: dict[str, Any]) -> list[str]:
    """Why a model cannot run, the most telling reason first."""
    given = {key: value for key, value in config.items() if value not in (None, False, 0, [], {})}
    found = [
        f"{key} = {json.dumps(given[key])}: {what} is not described by the spec"
        for key, what in (
            ("kv_lora_rank", "latent attention (MLA)"),
            ("attn_logit_softcapping", "a soft cap of the scores"),
        )
        if key in given
    ]
    if "sliding_window" in given and config.get("use_sliding_window", True):
        found.append(f"sliding_window = {given['sliding_window']}: windows of a model are not served yet")
    if any(kind != "full_attention" for kind in given.get("layer_types", ())):
        found.append(f"layer_types: {sorted(set(given['layer_types']))}, and only full_attention is served")
    if config.get("model_type") not in MODEL_TYPES:
        found.append(f"model_type = {json.dumps(config.get('model_type'))} is not supported")
    if "quantization_config" in given:
        found.append("quantization_config: weights must be plain f32, f16 or bf16")
    rope = rope_kind(config)
    if rope not in FIXED_ROPE:
        found.append(f"RoPE of kind {rope}: its angles change with the length of the batch")
    return found


def rope_kind(config: dict[str, Any]) -> str:
    """The name of the RoPE scaling, under any of the keys that transformers has used."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def shape_of(config: dict[str, Any], folder: Path) -> ModelShape:
    """The shape that config.json gives; ``ArgumentError`` names a field that is missing or no count."""

    def count(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{folder}: config.json: {keys[0]} = {value!r}; give a positive integer")
        return value

    heads = count("num_attention_heads")
    return ModelShape(
        layers=count("num_hidden_layers"),
        q_heads=heads,
        kv_heads=count("num_key_value_heads", default=heads),
        head_dim=count("head_dim", default=count("hidden_size") // heads),
        vocab_size=count("vocab_size"),
        max_positions=count("max_position_embeddings", default=2048),
    )


def check_pages(pages: str) -> None:
    """Refuse what is no key of ``PAGES`` with an ``ArgumentError``, before any model is loaded for it."""
    if pages not in PAGES:
        raise ArgumentError(f"--pages {pages}: give one of {', '.join(PAGES)}")


def spec_for(shape: ModelShape, pages: str = "f32", *, page_size: int = 16) -> Spec:
    """The spec of a cache for a model that computes in f32.

    ``pages`` is a key of ``PAGES``, and the spec's name. Raises ``SpecError`` for a shape that no kernel has.
    """
    check_pages(pages)
    return load_spec(
        {
            "name": pages,
            "attention": {
                "q_heads": shape.q_heads,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "q_dtype": "f32",
            },
            "cache": {
                "page_size": page_size,
                "layout": "page kv head tok d",
                "k": PAGES[pages],
                "v": PAGES[pages],
            },
        }
    )


def check_matches(spec: Spec, shape: ModelShape) -> None:
    """Raise ``SpecError`` with every field of ``spec`` that does not suit the model."""
    want: dict[str, Any] = {
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "causal": True,
        "window": None,
        "scale": shape.head_dim**-0.5,
    }
    wrong = [
        Diagnostic(f"attention.{key}", getattr(spec.attention, key), f"the model has {value!r}")
        for key, value in want.items()
        if getattr(spec.attention, key) != value
    ]
    for side in ("k", "v"):
        if spec.cache.quant(side).static_scale:
            group = dict(spec.cache.quant(side).group)
            reason = "its scales would have to be known before the text is"
            wrong.append(Diagnostic(f"cache.{side}.group", group, reason, "use { tok = 1, head = 1 }"))
    if wrong:
        raise SpecError(wrong)
