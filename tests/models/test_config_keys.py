"""What a config.json asks for is computed or refused by name; what says nothing new passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import KvgenError
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.families import FAMILIES
from kvgen.models.other_keys import EMPTY
from kvgen.models.shape import CheckpointWarning, check_supported, shape_of
from tests.models.test_shape import HERE, LATENT, LLAMA, of
from tests.support.checkpoints import FAMILY_SHAPES, make_checkpoint

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (LLAMA | {"is_causal": False}, "is_causal = false: prompts are computed in chunks"),
        (LLAMA | {"bias": True}, "bias = true"),
        (LLAMA | {"qkv_bias": True}, "qkv_bias = true"),
        (LLAMA | {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (LLAMA | {"residual_multiplier": 0.22}, "residual_multiplier"),
        (LLAMA | {"logits_scaling": 8.0}, "logits_scaling"),
        (LLAMA | {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (LLAMA | {"attention_window": 0}, "attention_window = 0: "),
        (LLAMA | {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        (LLAMA | {"num_layers": 3}, "num_layers = 3: LlamaForCausalLM computes 2"),
        (LLAMA | {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (LLAMA | {"sliding_window": 0}, "sliding_window = 0: too small"),
        (LLAMA | {"architectures": ["LlamaModel"]}, "only LlamaForCausalLM, which predicts the next token"),
        (LLAMA | {"compression_config": {"bits": 4}}, "compression_config"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: rows are rotated whole"),
        (
            LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.25}},
            r"rope_parameters\.partial_rotary_factor",
        ),
        (
            LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            "RoPE of kind mrope: its positions have three parts",
        ),
        (LLAMA | {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "RoPE of kind mrope"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "default", "factor": 4.0}},
            "RoPE of kind default has no such setting",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 4.0}},
            "keep one of them",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "the kinds that are served are default",
        ),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": {"rope_theta": 5.0}},
            "rope_parameters and rope_scaling differ",
        ),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "for all layers together"),
        (of("gemma3_text", rope_parameters={"rope_type": "linear", "factor": 8.0}), "by layer type"),
        (of("gemma3_text", attn_logit_softcapping=50.0), "soft cap"),
        (
            of("gemma2", hidden_act="silu"),
            'hidden_act = "silu": Gemma2ForCausalLM computes "gelu_pytorch_tanh"',
        ),
        (of("gemma2", sliding_window_pattern=6), "sliding_window_pattern = 6: Gemma2ForCausalLM computes 2"),
        (of("mistral", use_sliding_window=False, sliding_window=8), "use_sliding_window = false: MistralFor"),
        (of("mistral", sliding_window=8, max_window_layers=1), "max_window_layers = 1"),
        (of("mistral", sliding_window=8, layer_types=["full_attention"] * 2), "layers of several kinds"),
        (of("mistral", attention_bias=True), "attention_bias = true"),
        (of("gpt_oss", hidden_act="gelu"), 'hidden_act = "gelu": GptOssForCausalLM computes "silu"'),
        (of("gpt_oss", experts_per_token=3), "experts_per_token = 3: GptOssForCausalLM computes 4"),
        (of("deepseek_v2", num_key_value_heads=4, **LATENT, norm_topk_prob=True), "norm_topk_prob = true"),
        (of("deepseek_v2", num_key_value_heads=4, **LATENT, scoring_func="sigmoid"), "scoring_func"),
    ],
    ids=lambda value: str(value)[-60:] if isinstance(value, dict) else "",
)
def test_what_a_config_asks_for_is_done_or_refused(config: dict[str, Any], match: str) -> None:
    def supported() -> None:
        check_supported(config, HERE)
        shape_of(config, HERE)

    with pytest.raises(KvgenError, match=match) as caught:
        supported()
    assert str(HERE) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"is_causal": True, "bias": False, "clip_qkv": None, "pretraining_tp": 2, "num_layers": 2},
        LLAMA | {"architectures": ["LLaMAForCausalLM"], "torch_dtype": "bfloat16", "use_cache": False},
        LLAMA | {"_name_or_path": "x", "temperature": 0.5, "max_length": 4096, "unsloth_version": "2026.1"},
        LLAMA | {"auto_map": {"AutoModel": "x.Y"}, "id2label": {"0": "a"}, "attn_implementation": "sdpa"},
        LLAMA | {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28},
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}},
        LLAMA | {"partial_rotary_factor": 1.0, "pad_token_id": -1, "rope_theta": 500000},
        of("mistral", sliding_window=8, layer_types=["sliding_attention"] * 2),
        of("gemma2", hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid"),
        of("gpt_oss", experts_per_token=4, initial_context_length=4096, router_aux_loss_coef=0.9),
        of(
            "deepseek_v3",
            num_key_value_heads=4,
            **LATENT,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            moe_layer_freq=1,
            ep_size=1,
            aux_loss_alpha=0.001,
            seq_aux=True,
            num_nextn_predict_layers=1,
        ),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_says_nothing_new_passes(config: dict[str, Any]) -> None:
    check_supported(config, HERE)
    assert len(shape_of(config, HERE).layers) == 2


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 3.1": LLAMA
    | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
    },
    "smollm2": LLAMA
    | {
        "is_llama_config": True,
        "pad_token_id": 2,
        "rope_interleaved": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "qwen3": of(
        "qwen3",
        max_window_layers=36,
        rope_scaling=None,
        sliding_window=None,
        use_sliding_window=False,
        rope_theta=1000000,
    ),
    "gemma 2": of(
        "gemma2",
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=8,
        sliding_window_size=8,
    ),
    "gemma 3": of(
        "gemma3_text",
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=8,
        sliding_window_pattern=6,
    ),
    "gpt-oss": of(
        "gpt_oss",
        attention_bias=True,
        experts_per_token=4,
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"],
        num_experts_per_tok=4,
        num_local_experts=32,
        output_router_logits=False,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=8,
        swiglu_limit=7.0,
    ),
    "deepseek v2 lite": of(
        "deepseek_v2",
        num_key_value_heads=4,
        **LATENT,
        aux_loss_alpha=0.001,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        ep_size=1,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        pretraining_tp=1,
        q_lora_rank=None,
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        seq_aux=True,
        topk_group=1,
        topk_method="greedy",
    ),
}
"""The keys of published checkpoints, with small sizes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_pass_without_a_word(name: str, recwarn: Any) -> None:
    check_supported(PUBLISHED[name], HERE)
    assert len(shape_of(PUBLISHED[name], HERE).layers) == 2
    assert not [found for found in recwarn if issubclass(found.category, CheckpointWarning)]


def test_a_key_that_nobody_has_heard_of_is_reported() -> None:
    with pytest.warns(CheckpointWarning, match=r"config\.json: colour = 3: LlamaForCausalLM .* ignored"):
        shape_of(LLAMA | {"colour": 3}, HERE)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_itself_passes_without_a_word(
    family: str, tmp_path: Path, recwarn: Any
) -> None:
    load_model(make_checkpoint(tmp_path, family=family, **FAMILY_SHAPES.get(family, {})))
    assert not [found for found in recwarn if issubclass(found.category, CheckpointWarning)]


def test_nothing_that_asks_for_nothing_is_a_number() -> None:
    assert "0" not in EMPTY
