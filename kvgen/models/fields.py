"""The fields of a config.json that decide sizes and numbers, and what each may hold.

Checked before transformers sees any of them: it trusts its configs, and would build a billion layers where
one asks for so many. What the bounds leave is held against the weights that are there (``models.weights``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.models.folder_files import CONFIG, refusal


@dataclass(frozen=True)
class Rule:
    """What a field may hold."""

    kind: str
    """``integer``, ``number``, ``flag``, ``text``, ``texts`` or ``table``."""
    low: float = -math.inf
    high: float = math.inf
    null: bool = False
    """Whether null is a value: transformers then takes its default, or leaves the thing out."""
    above: bool = False
    """Whether ``low`` itself is too small."""
    note: str = ""
    """What explains the lower bound."""

    @property
    def wanted(self) -> str:
        """What would work, in words."""
        low, high = (
            f"{bound:,.15g}" if abs(bound) < 1e15 else f"{bound:g}" for bound in (self.low, self.high)
        )
        span = ""
        if self.low > -math.inf:
            after = f"above {low}" if self.above else f"of at least {low}"
            span = f" from {low} to {high}" if self.high < math.inf and not self.above else f" {after}"
        return f"give {WORDS[self.kind]}{span}{' or null' if self.null else ''}"

    def fault(self, value: Any) -> str:
        """Why ``value`` cannot be; empty where it can."""
        if value is None and self.null:
            return ""
        if not HOLDS[self.kind](value):
            return "not a boolean" if self.kind == "flag" else f"not {WORDS[self.kind]}"
        if self.kind not in ("integer", "number"):
            return ""
        if not math.isfinite(value if abs(value) < 2**1000 else math.inf):
            return "not a finite number"
        if value < self.low or (self.above and value == self.low):
            return f"too small: {self.note}" if self.note else "too small"
        return "too large" if value > self.high else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


WORDS = {
    "integer": "an integer",
    "number": "a number",
    "flag": "true or false",
    "text": "a string",
    "texts": "a list of strings",
    "table": "a JSON object",
}

HOLDS: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": _is_number,
    "flag": lambda value: isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "table": lambda value: isinstance(value, dict),
}


def _count(high: int, *, null: bool = False, low: int = 1) -> Rule:
    return Rule("integer", low, high, null)


_WIDTH = _count(1 << 24)
_SHARE = Rule("number", 0, 1, null=True)
_POSITIVE = Rule("number", 0, null=True, above=True)
_FLAG = Rule("flag", null=True)

FIELDS: dict[str, Rule] = {
    "model_type": Rule("text"),
    "architectures": Rule("texts", null=True),
    "num_hidden_layers": _count(10_000),
    "num_attention_heads": _count(1 << 16),
    "num_key_value_heads": _count(1 << 16, null=True),
    "head_dim": _count(1 << 16, null=True),
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "vocab_size": _count(1 << 30),
    "max_position_embeddings": _count((1 << 31) - 1),
    "hidden_act": Rule("text"),
    "hidden_activation": Rule("text", null=True),
    "rms_norm_eps": Rule("number", 0, 1),
    "tie_word_embeddings": Rule("flag"),
    "attention_bias": Rule("flag"),
    "mlp_bias": Rule("flag"),
    "attention_dropout": _SHARE,
    "initializer_range": Rule("number", 0, 1, null=True),
    "use_cache": _FLAG,
    "pretraining_tp": _count(1 << 16, null=True),
    # Attention.
    "sliding_window": Rule("integer", 1, (1 << 31) - 1, null=True, note="it counts the query's own key"),
    "sliding_window_pattern": _count(10_000),
    "use_sliding_window": _FLAG,
    "max_window_layers": _count(10_000, null=True, low=0),
    "layer_types": Rule("texts", null=True),
    "query_pre_attn_scalar": Rule("number", 0, 1 << 24, null=True, above=True),
    "attn_logit_softcapping": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "is_causal": _FLAG,
    "use_bidirectional_attention": _FLAG,
    "rope_theta": Rule("number", 0, above=True),
    "rope_local_base_freq": Rule("number", 0, above=True),
    "partial_rotary_factor": Rule("number", 0, 1, null=True, above=True),
    "rope_scaling": Rule("table", null=True),
    "rope_parameters": Rule("table", null=True),
    "rope_interleave": _FLAG,
    # Latent attention.
    "kv_lora_rank": _count(1 << 16, null=True),
    "q_lora_rank": _count(1 << 16, null=True),
    "qk_nope_head_dim": _count(1 << 16),
    "qk_rope_head_dim": _count(1 << 16),
    "v_head_dim": _count(1 << 16),
    # Experts.
    "n_routed_experts": _count(1 << 16),
    "num_local_experts": _count(1 << 16),
    "num_experts_per_tok": _count(1 << 16, null=True),
    "n_shared_experts": _count(1 << 16, null=True, low=0),
    "first_k_dense_replace": _count(10_000, low=0),
    "n_group": _count(1 << 16, null=True),
    "topk_group": _count(1 << 16, null=True),
    "topk_method": Rule("text", null=True),
    "norm_topk_prob": _FLAG,
    "routed_scaling_factor": _POSITIVE,
    "swiglu_alpha": _POSITIVE,
    "swiglu_limit": _POSITIVE,
    "num_nextn_predict_layers": _count(10_000, null=True, low=0),
    "num_mtp_layers": _count(10_000, null=True, low=0),
    "quantization_config": Rule("table", null=True),
}
"""Field -> what it may hold. Lower bounds and kinds are the meaning's; upper ones only keep sizes finite."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that name tokens; -1 is an old way to say that there is none."""


def check_fields(config: dict[str, Any], folder: Path) -> None:
    """Raise ``ArgumentError`` for the first field of a config.json that holds what it may not."""
    path = folder / CONFIG
    for key, rule in FIELDS.items():
        if key in config and (fault := rule.fault(config[key])):
            raise refusal(path, key, config[key], fault, rule.wanted)
    check_tokens(config, path, config.get("vocab_size"))


def check_tokens(settings: dict[str, Any], path: Path, vocabulary: int | None) -> None:
    """Refuse numbers of special tokens that a model of so many tokens has not."""
    limit = vocabulary or 1 << 30
    rule = Rule("integer", -1, limit - 1, null=True)
    for key in TOKENS:
        value = settings.get(key)
        several = key == "eos_token_id" and isinstance(value, list)
        for token in value if several and isinstance(value, list) else [value]:
            fault = rule.fault(token)
            if fault.startswith("too "):
                fault = f"the model has tokens 0 to {limit - 1:,}"
            if fault:
                hint = "give a token's number, a list of them, or null" if key == "eos_token_id" else ""
                raise refusal(path, key, value, fault, hint or "give a token's number or null")
