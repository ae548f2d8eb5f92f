"""The shape of a model: what its config.json says about each layer's attention, and why some are refused."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.models.families import FAMILIES, FEATURES, Family
from kvgen.models.fields import check_fields
from kvgen.models.folder_files import CONFIG, named, read_json, refusal, shown
from kvgen.models.other_keys import EMPTY, other_keys
from kvgen.models.rope_fields import LAYER_TYPES, check_rope, rope_obstacles
from kvgen.models.together import check_together, check_types

CAUSAL = "prompts are computed in chunks, so no token sees the ones after it"


class CheckpointWarning(UserWarning):
    """A checkpoint says something that is not acted on, and that its numbers do not seem to depend on."""


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
    """config.json of a checkpoint folder; ``ArgumentError`` where there is none, or none that can be read."""
    config = read_json(folder, CONFIG)
    if config is None:
        hint = f"give the folder of a checkpoint ({', '.join(FAMILIES)})"
        raise ArgumentError(f"{folder}: no config.json; {hint}")
    return config


def check_supported(config: dict[str, Any], folder: Path) -> None:
    """Refuse a model that kvgen cannot serve as its config.json has it.

    ``UnsupportedError`` has the reason: what the config asks for is computed, or is refused by name.
    ``ArgumentError`` names a field that holds what it may not.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        _refuse([f"model_type = {shown(name)} is not supported"], folder)
    check_fields(config, folder)
    family = FAMILIES[config["model_type"]]
    _refuse(_obstacles(config, family), folder)
    _refuse(rope_obstacles(config, by_type="rope_by_type" in family.features), folder)
    check_rope(config, folder)


def _refuse(obstacles: list[str], folder: Path) -> None:
    """Raise the first obstacle, the most telling one."""
    if obstacles:
        raise UnsupportedError(f"{folder}: {obstacles[0]}; kvgen runs {', '.join(FAMILIES)} checkpoints")


def _obstacles(config: dict[str, Any], family: Family) -> list[str]:
    """Why a model of a known family cannot run, the most telling reason first."""
    given = {key: value for key, value in config.items() if shown(value) not in EMPTY}
    found = []
    if not config.get("use_sliding_window", True) and "use_sliding_window" not in family.reads():
        window = given.pop("sliding_window", None)
        if window is not None and "sliding_window" in family.features:
            found.append(f"use_sliding_window = false: {family.model} always uses sliding_window = {window}")
    kinds = sorted(set(given.get("layer_types", ())) - set(LAYER_TYPES))
    if kinds:
        names = ", ".join(map(named, kinds[:4]))
        found.append(f"layer_types: {names}, and only {' and '.join(LAYER_TYPES)} are served")
    for key, what in FEATURES.items():
        if key in given and key not in family.features and not _plain(config, key, family):
            name = shown(config["model_type"])
            value = shown(given[key])
            found.append(f"{key} = {value}: {what}, which transformers' code for {name} does not have")
    if "use_bidirectional_attention" in given:
        found.append(f"use_bidirectional_attention: {CAUSAL}")
    if config.get("is_causal") is False:
        found.append(f"is_causal = false: {CAUSAL}")
    if "quantization_config" in given:
        found.append("quantization_config: weights must be plain f32, f16 or bf16")
    heads = config.get("architectures")
    if heads and family.model.lower() not in [head.lower() for head in heads]:
        found.append(f"architectures = {shown(heads)}: only {family.model}, which predicts the next token")
    first = config.get("max_window_layers")
    if first is not None and "sliding_window" in given and "max_window_layers" not in family.reads():
        found.append(f"max_window_layers = {first}: {family.model} does not read it")
    return found


def _plain(config: dict[str, Any], key: str, family: Family) -> bool:
    """Whether the layers of a model are what its class has anyway, where it has layers of one kind only."""
    windowed = "sliding_window" in family.features and config.get("sliding_window", 4096) is not None
    own = "sliding_attention" if windowed else "full_attention"
    return key == "layer_types" and set(config[key]) == {own}


def shape_of(config: dict[str, Any], folder: Path) -> ModelShape:
    """The shape that config.json gives, with transformers' defaults for what it leaves out.

    ``ArgumentError`` names a field that is missing, holds what it may not or does not go with the others;
    ``UnsupportedError`` a key that the model's class does not have and that its numbers may depend on. What
    such keys say besides is a ``CheckpointWarning``. Give what ``check_supported`` passed.
    """
    check_fields(config, folder)
    family = FAMILIES[config["model_type"]]
    for key in ("num_attention_heads", "num_hidden_layers"):
        _count(config.get(key), key, folder)  # transformers' default would be another model's
    check_types(config, folder)
    whole = family.config(config, folder)
    found = list(other_keys(config, family, whole))
    _refuse(
        [f"{words}; remove the key if the numbers do not depend on it" for words, bad in found if bad], folder
    )
    ignored = [words for words, bad in found if not bad]
    if ignored:
        more = f" (and {len(ignored) - 1} more keys)" if len(ignored) > 1 else ""
        warnings.warn(f"{folder / CONFIG}: {ignored[0]}: ignored{more}", CheckpointWarning, stacklevel=2)
    check_together(whole, folder, config)

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
        reason = "missing" if value is None else "not a positive integer"
        raise refusal(folder / CONFIG, key, value, reason, "give a positive integer")
    return value
