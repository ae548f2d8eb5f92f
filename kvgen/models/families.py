"""Families of models: transformers' class for each, and what its attention code does beyond the plain one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError

FEATURES = {
    "kv_lora_rank": "latent attention (MLA)",
    "attn_logit_softcapping": "a soft cap of the scores",
    "query_pre_attn_scalar": "a scale of its own",
    "sliding_window": "a sliding window",
    "layer_types": "layers of several kinds",
}
"""Keys of a config.json that change attention."""


@dataclass(frozen=True)
class Family:
    """Checkpoints of one ``model_type``."""

    model: str
    """The class in transformers."""
    features: frozenset[str] = frozenset()
    """Keys of ``FEATURES`` that the class follows, and ``sinks`` where each head has a learned logit."""

    def model_class(self) -> Any:
        """transformers' class."""
        import transformers

        return getattr(transformers, self.model)

    def config(self, values: dict[str, Any], folder: Path) -> Any:
        """config.json as transformers' config, defaults filled in; ``ArgumentError`` for what it refuses."""
        from huggingface_hub.errors import StrictDataclassError

        try:
            return self.model_class().config_class.from_dict(values)
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            raise ArgumentError(f"{folder}: config.json: {' '.join(str(error).split())}") from error

    def rope_gain(self, config: Any) -> float:
        """What DeepSeek's yarn multiplies the scale by: its ``mscale`` squared."""
        rope = config.rope_parameters or {}
        factor, gain = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
        if rope.get("rope_type", "default") == "default" or not gain or factor <= 1:
            return 1.0
        return float((0.1 * gain * math.log(factor) + 1.0) ** 2)


def _family(model: str, *features: str) -> Family:
    return Family(model, frozenset(features))


FAMILIES = {
    "llama": _family("LlamaForCausalLM"),
    "mistral": _family("MistralForCausalLM", "sliding_window"),
    "qwen3": _family("Qwen3ForCausalLM", "sliding_window", "layer_types"),
    "gemma2": _family(
        "Gemma2ForCausalLM",
        "sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "query_pre_attn_scalar",
    ),
    "gemma3_text": _family("Gemma3ForCausalLM", "sliding_window", "layer_types", "query_pre_attn_scalar"),
    "gpt_oss": _family("GptOssForCausalLM", "sliding_window", "layer_types", "sinks"),
    "deepseek_v2": _family("DeepseekV2ForCausalLM", "kv_lora_rank"),
    "deepseek_v3": _family("DeepseekV3ForCausalLM", "kv_lora_rank"),
}
"""``model_type`` -> family: checkpoints whose attention a spec describes fully."""
