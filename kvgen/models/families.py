"""Families of models: transformers' class for each, and what its attention code does beyond the plain one."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError
from kvgen.models.folder_files import CONFIG, reason_of

FEATURES = {
    "kv_lora_rank": "latent attention (MLA)",
    "attn_logit_softcapping": "a soft cap of the scores",
    "query_pre_attn_scalar": "a scale of its own",
    "sliding_window": "a sliding window",
    "layer_types": "layers of several kinds",
}
"""Keys of a config.json that change attention."""


ROPE = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    }
)
"""Keys that every class of transformers takes besides its fields; ``rope_fields`` checks them."""


@dataclass(frozen=True)
class Family:
    """Checkpoints of one ``model_type``."""

    model: str
    """The class in transformers."""
    features: frozenset[str] = frozenset()
    """Keys of ``FEATURES`` that the class follows, ``sinks`` where each head has a learned logit, and
    ``rope_by_type`` where types of layers rotate by angles of their own."""
    sayings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key of a config.json -> the only values, beside null, that the class computes."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Key of a config.json -> the field of the class that must say the same."""
    extra_keys: frozenset[str] = frozenset()
    """Keys of a config.json that the class reads besides its fields."""

    def model_class(self) -> Any:
        """transformers' class."""
        import transformers

        return getattr(transformers, self.model)

    def reads(self) -> frozenset[str]:
        """The keys of a config.json that the class reads and that decide sizes or numbers."""
        from transformers import PreTrainedConfig

        made = self.model_class().config_class
        general = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        own = {field.name for field in dataclasses.fields(made)} - general
        return frozenset(own | set(made.attribute_map) | ROPE | self.extra_keys)

    def config(self, values: dict[str, Any], folder: Path) -> Any:
        """config.json as transformers' config, defaults filled in; ``ArgumentError`` for what it refuses.

        transformers makes attributes and methods of whatever keys it is given: it gets those of ``reads``.
        """
        known = self.reads()
        try:
            made = self.model_class().config_class.from_dict(
                {key: copy.deepcopy(value) for key, value in values.items() if key in known}
            )
        except Exception as error:  # whatever odd values make of somebody else's code
            raise ArgumentError(f"{folder / CONFIG}: {reason_of(error)}") from error
        return made

    def rope_gain(self, config: Any) -> float:
        """What DeepSeek's yarn multiplies the scale by: its ``mscale`` squared."""
        rope = config.rope_parameters or {}
        factor, gain = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
        if rope.get("rope_type", "default") == "default" or not gain or factor <= 1:
            return 1.0
        return float((0.1 * gain * math.log(factor) + 1.0) ** 2)


def _family(model: str, *features: str, **more: Any) -> Family:
    return Family(model, frozenset(features), **more)


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
        sayings={"sliding_window_pattern": (2,)},
        synonyms={"hidden_act": "hidden_activation"},
    ),
    "gemma3_text": _family(
        "Gemma3ForCausalLM",
        "sliding_window",
        "layer_types",
        "query_pre_attn_scalar",
        "rope_by_type",
        synonyms={"hidden_act": "hidden_activation"},
        extra_keys=frozenset({"sliding_window_pattern", "rope_local_base_freq"}),
    ),
    "gpt_oss": _family(
        "GptOssForCausalLM",
        "sliding_window",
        "layer_types",
        "sinks",
        sayings={"hidden_act": ("silu",)},
        synonyms={"experts_per_token": "num_experts_per_tok"},
    ),
    "deepseek_v2": _family(
        "DeepseekV2ForCausalLM",
        "kv_lora_rank",
        sayings={
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "rope_interleave": (True,),
        },
    ),
    "deepseek_v3": _family(
        "DeepseekV3ForCausalLM",
        "kv_lora_rank",
        sayings={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        synonyms={"head_dim": "qk_rope_head_dim"},
    ),
}
"""``model_type`` -> family: checkpoints whose attention a spec describes fully."""
