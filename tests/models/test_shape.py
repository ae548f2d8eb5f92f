"""What a config says: the shape of each layer, and why some models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.models.extras import installed
from kvgen.models.families import FAMILIES
from kvgen.models.shape import LayerShape, ModelShape, check_supported, read_config, shape_of

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

HERE = Path("models/llama")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}

LATENT = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "head_dim": None,
    "num_experts_per_tok": 2,
}

FULL = LayerShape(q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25)


def of(model_type: str, **changes: Any) -> dict[str, Any]:
    return LLAMA | {"model_type": model_type, "head_dim": 16} | changes


def layers(config: dict[str, Any]) -> list[dict[str, Any]]:
    """What differs from ``FULL`` in each layer."""
    check_supported(config, HERE)
    return [
        {key: value for key, value in vars(layer).items() if value != getattr(FULL, key)}
        for layer in shape_of(config, HERE).layers
    ]


def test_the_shape_of_a_config() -> None:
    assert shape_of(LLAMA, HERE) == ModelShape((FULL, FULL), vocab_size=97, max_positions=128)
    assert shape_of(LLAMA, HERE).kinds == (FULL,)
    assert shape_of(LLAMA | {"head_dim": 24}, HERE).layers[0].head_dim == 24
    # Old checkpoints have null, or no entry, where every query head has its own K and V.
    assert shape_of(LLAMA | {"num_key_value_heads": None, "head_dim": None}, HERE).layers[0].kv_heads == 4


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (of("mistral", sliding_window=8), [{"window": 7}, {"window": 7}]),
        (of("mistral", sliding_window=None), [{}, {}]),
        (of("mistral"), [{"window": 4095}] * 2),  # transformers' default
        (of("qwen3", sliding_window=8, use_sliding_window=False), [{}, {}]),
        (
            of("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=1),
            [{}, {"window": 7}],
        ),
        (
            of("gemma2", sliding_window=8, query_pre_attn_scalar=64),
            [{"window": 7, "soft_cap": 50.0, "scale": 0.125}, {"soft_cap": 50.0, "scale": 0.125}],
        ),
        (of("gemma2", attn_logit_softcapping=None, query_pre_attn_scalar=16), [{"window": 4095}, {}]),
        (
            of("gemma3_text", sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=16),
            [{"window": 7}, {}],
        ),
        (of("gpt_oss", sliding_window=8), [{"window": 7, "sink": True}, {"sink": True}]),
        (
            of("deepseek_v2", num_key_value_heads=4, **LATENT),
            [{"kv_heads": 1, "head_dim": 48, "v_head_dim": 32, "scale": 0.125, "latent": True}] * 2,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_layers_of_a_family(config: dict[str, Any], want: list[dict[str, Any]]) -> None:
    assert layers(config) == want


def test_the_scale_of_latent_attention_is_that_of_transformers_own_code() -> None:
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    config = of("deepseek_v3", num_key_value_heads=None, rope_parameters=rope, **LATENT)
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    own = DeepseekV3Attention(FAMILIES["deepseek_v3"].config(config, HERE), 0)
    assert shape_of(config, HERE).layers[0].scale == pytest.approx(own.scaling) != 0.125


@pytest.mark.parametrize("value", [0, -1, True, "4", 2.5, None])
def test_fields_that_are_no_count(value: object) -> None:
    with pytest.raises(ArgumentError, match="num_attention_heads"):
        shape_of(LLAMA | {"num_attention_heads": value}, HERE)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"vocab_size": 0}, {"head_dim": -3}], ids=str)
def test_fields_that_transformers_refuses_or_would_trip_over(change: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=rf"config\.json.*{next(iter(change))}"):
        shape_of(LLAMA | change, HERE)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sliding_window": 4096}, "sliding_window = 4096: a sliding window, which transformers' code"),
        ({"attn_logit_softcapping": 50.0}, "soft cap"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, 'code for "gemma3_text" does not'),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "qwen2_moe"}, 'model_type = "qwen2_moe" is not supported'),
        ({"model_type": None}, "model_type = null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "layer_types: chunked_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE of kind dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE of kind longrope"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}},
            },
            "RoPE of kind dynamic",
        ),
    ],
)
def test_models_that_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        check_supported(LLAMA | change, HERE)
    assert str(HERE) in str(caught.value) and "kvgen runs llama, mistral" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 2},
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_scaling": None},
    ],
)
def test_models_that_are_served(change: dict[str, object]) -> None:
    check_supported(LLAMA | change, HERE)


@pytest.mark.parametrize(
    ("text", "match"), [(None, "no config.json"), ("{", "not JSON"), ("[]", "not a JSON object")]
)
def test_folders_that_are_no_checkpoint(tmp_path: Path, text: str | None, match: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match=match):
        read_config(tmp_path)
