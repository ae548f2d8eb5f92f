"""Tiny random checkpoints of every family, made by transformers, and texts for them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

VOCABULARY = 97

SHAPES: dict[str, dict[str, Any]] = {
    "gqa-tied": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mha-untied": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24},
    "group3-wide-heads": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "llama3-rope-bias": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
"""Name -> what differs from ``make_checkpoint``'s config of a Llama."""

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}

FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "mistral": {**_HEADS, "sliding_window": 8},
    "qwen3": _HEADS,
    "gemma2": {**_HEADS, "sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        **_HEADS,
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {**_HEADS, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, **_EXPERTS, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, **_EXPERTS, "q_lora_rank": 24},
}
"""``model_type`` -> what differs from ``make_checkpoint``'s config. Windows are short enough to matter."""


def make_checkpoint(
    folder: Path, *, family: str = "llama", tokenizer: bool = False, seed: int = 0, **changes: Any
) -> Path:
    """Write a two-layer model with random weights; its logits are far apart, so that greedy is decisive."""
    import torch

    from kvgen.models.families import FAMILIES

    made = FAMILIES[family].model_class()
    config = made.config_class(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    with seeded(seed):
        made(config).to(torch.float32).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, and an end token that is the last of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(32 + i): i for i in range(VOCABULARY - 2)}
    words = Tokenizer(models.WordLevel({**letters, "<unk>": 95, "<end>": 96}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<end>", chat_template=template
    )
    fast.save_pretrained(folder)


@contextlib.contextmanager
def seeded(seed: int) -> Any:
    """Draw from a seed inside the block and leave torch's generator as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
