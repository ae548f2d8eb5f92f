"""Fields of a config.json that do not go with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgen.models.folder_files import CONFIG, refusal


def check_types(config: dict[str, Any], folder: Path) -> None:
    """Refuse a list of layers that has not one entry for each."""
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is not None and len(types) != layers:
        hint = f"give {layers}, or leave it out"
        reason = f"not one entry for each layer (num_hidden_layers = {layers})"
        raise refusal(folder / CONFIG, "layer_types", types, reason, hint)


def check_together(whole: Any, folder: Path, config: dict[str, Any]) -> None:
    """Refuse fields that do not go with each other, transformers' defaults included."""
    path = folder / CONFIG
    types = getattr(whole, "layer_types", None) or ()
    if "sliding_attention" in types and whole.sliding_window is None:
        why = "layer_types has sliding_attention"
        if config.get("sliding_window") is not None:
            hint = "give true, or layers of full_attention"
            raise refusal(path, "use_sliding_window", config.get("use_sliding_window", False), why, hint)
        raise refusal(path, "sliding_window", None, why, "give a number of keys, or layers of full_attention")
    heads, groups = whole.num_attention_heads, whole.num_key_value_heads
    if getattr(whole, "kv_lora_rank", None) and heads != groups:
        reason = f"latents serve each of the {heads} heads of num_attention_heads"
        raise refusal(path, "num_key_value_heads", groups, reason, f"give {heads}")
    if heads % groups:
        reason = f"does not divide num_attention_heads = {heads}"
        raise refusal(path, "num_key_value_heads", groups, reason, "give a divisor")
    for key in ("hidden_act", "hidden_activation"):
        _check_activation(getattr(whole, key, None), key, path)
    _check_experts(whole, path)


def _check_activation(value: str | None, key: str, path: Path) -> None:
    from transformers.activations import ACT2FN

    if value is not None and value not in ACT2FN:
        raise refusal(path, key, value, "no activation of transformers", f"give one of {', '.join(ACT2FN)}")


def _check_experts(whole: Any, path: Path) -> None:
    """Refuse a choice of experts that there are not."""
    there = getattr(whole, "n_routed_experts", None) or getattr(whole, "num_local_experts", None)
    if not there:
        return
    _check_part(whole, "num_experts_per_tok", there, "experts", path)
    if hasattr(whole, "n_group") and getattr(whole, "topk_method", "") != "greedy":
        _check_part(whole, "n_group", there, "experts", path)
        if there % whole.n_group:
            raise refusal(
                path, "n_group", whole.n_group, f"does not divide {there} experts", "give a divisor"
            )
        _check_part(whole, "topk_group", whole.n_group, "groups", path)


def _check_part(whole: Any, key: str, there: int, what: str, path: Path) -> None:
    """Refuse a number of ``what`` that is missing or more than ``there`` are."""
    value = getattr(whole, key)
    if value is None or value > there:
        reason = "missing" if value is None else f"more than the model has {what}"
        raise refusal(path, key, value, reason, f"give an integer from 1 to {there}")
