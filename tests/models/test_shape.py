"""What a config says: the shape, the spec of its cache, and why some models are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import ArgumentError, SpecError, UnsupportedError
from kvgen.models.shape import (
    PAGES,
    ModelShape,
    check_matches,
    check_supported,
    read_config,
    shape_of,
    spec_for,
)
from kvgen.passes.validate import load_spec

HERE = Path("models/llama")

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}

SHAPE = ModelShape(layers=2, q_heads=4, kv_heads=2, head_dim=16, vocab_size=97, max_positions=128)


def test_the_shape_of_a_config() -> None:
    check_supported(LLAMA, HERE)
    assert shape_of(LLAMA, HERE) == SHAPE
    assert shape_of(LLAMA | {"head_dim": 24}, HERE).head_dim == 24
    # Old checkpoints have null, or no entry, where every query head has its own K and V.
    assert shape_of(LLAMA | {"num_key_value_heads": None, "head_dim": None}, HERE).kv_heads == 4


@pytest.mark.parametrize("value", [0, -1, True, "4", 2.5, None])
def test_fields_that_are_no_count(value: object) -> None:
    with pytest.raises(ArgumentError, match="num_attention_heads"):
        shape_of(LLAMA | {"num_attention_heads": value}, HERE)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "soft cap"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "qwen2_moe"}, 'model_type = "qwen2_moe" is not supported'),
        ({"model_type": None}, "model_type = null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE of kind dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE of kind longrope"),
    ],
)
def test_models_that_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        check_supported(LLAMA | change, HERE)
    assert str(HERE) in str(caught.value) and "kvgen runs llama" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"]},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
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


@pytest.mark.parametrize("pages", PAGES)
def test_the_spec_of_a_model(pages: str) -> None:
    spec = spec_for(SHAPE, pages, page_size=8)
    assert (spec.attention.q_heads, spec.attention.kv_heads, spec.attention.head_dim) == (4, 2, 16)
    assert (spec.cache.page_size, spec.cache.k.format, spec.cache.v.format) == (8, pages, pages)
    check_matches(spec, SHAPE)
    if pages == "int8":
        assert spec.cache.k.scale_dims == ("head", "tok")


def test_pages_that_do_not_exist() -> None:
    with pytest.raises(ArgumentError, match="f32, bf16, int8"):
        spec_for(SHAPE, "int4")


def test_heads_that_no_kernel_has() -> None:
    with pytest.raises(SpecError, match=r"attention\.head_dim = 12"):
        spec_for(shape_of(LLAMA | {"head_dim": 12}, HERE))


def test_every_mismatch_of_a_spec_is_named() -> None:
    table = {"q_heads": 8, "kv_heads": 2, "head_dim": 16, "window": 5}
    cache = {"page_size": 8, "layout": "page kv head tok d", "k": {"format": "bf16"}, "v": {"format": "bf16"}}
    with pytest.raises(SpecError) as caught:
        check_matches(load_spec({"attention": table, "cache": cache}), SHAPE)
    assert [found.path for found in caught.value.diagnostics] == ["attention.q_heads", "attention.window"]
    assert "the model has 4" in str(caught.value)


def test_scales_that_nobody_can_give() -> None:
    table = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
    int8 = {"format": "int8", "group": {"head": 1}}
    cache = {"page_size": 8, "layout": "page kv head tok d", "k": int8, "v": {"format": "bf16"}}
    with pytest.raises(SpecError, match=r"cache\.k\.group = .*known before") as caught:
        check_matches(load_spec({"attention": table, "cache": cache}), SHAPE)
    assert len(caught.value.diagnostics) == 1
