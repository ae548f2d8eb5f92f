"""Weights that the model's code would leave out are refused by name; harmless leftovers pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from tests.models.test_checkpoint import change_config
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")


@pytest.fixture
def spoil(tmp_path: Path) -> Any:
    """A copy of a checkpoint with other weights: ``change`` gets the dict of tensors."""
    from safetensors.torch import load_file, save_file

    def make(source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        folder = Path(shutil.copytree(source, tmp_path / "model"))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def test_biases_that_the_config_words_otherwise(checkpoint: Any, tmp_path: Path) -> None:
    """q, k, v and o have biases in the files, and config.json says ``bias``, a word of other families."""
    folder = make_checkpoint(tmp_path / "model", attention_bias=True)
    change_config(folder, attention_bias=False)
    with pytest.raises(
        ArgumentError, match=r"8 weights are unknown .* model\.layers\.0\.self_attn\.k_proj\.bias"
    ):
        load_model(folder)
    change_config(folder, bias=True)
    with pytest.raises(
        UnsupportedError, match=r"bias = true: LlamaForCausalLM in transformers has no such field"
    ):
        load_model(folder)
    change_config(folder, attention_bias=True, bias=False)
    assert len(load_model(folder).shape.layers) == 2


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.self_attn.q_proj.lora_A.weight",
        "score.weight",
    ],
)
def test_weights_that_no_code_asks_for(checkpoint: Any, spoil: Any, name: str) -> None:
    folder = spoil(checkpoint("gqa-tied"), lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(
        ArgumentError, match=rf"1 weights are unknown to this model's code, first {name}; they w"
    ):
        load_model(folder)


def test_layers_beyond_the_last(checkpoint: Any, spoil: Any) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.61.mlp.up_proj.weight"] = torch.ones(4)

    folder = spoil(checkpoint("deepseek_v3"), add)
    with pytest.raises(ArgumentError, match="num_hidden_layers = 2: the weights have 62 layers; give 62"):
        load_model(folder)


def test_a_layer_that_predicts_further_tokens_is_left_out(checkpoint: Any, spoil: Any) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.eh_proj.weight"] = torch.ones(4)

    folder = spoil(checkpoint("deepseek_v3"), add)
    change_config(folder, num_nextn_predict_layers=1)
    assert len(load_model(folder).shape.layers) == 2


def test_harmless_leftovers_pass(checkpoint: Any, spoil: Any) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for at in range(2):
            tensors[f"model.layers.{at}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    whole, folder = checkpoint("gqa-tied"), spoil(checkpoint("gqa-tied"), add)
    ids = torch.arange(20)[None]
    logits = []
    for path in (whole, folder):
        module = load_model(path).module
        module.set_attn_implementation("eager")
        with torch.inference_mode():
            logits.append(module(ids).logits)
    assert torch.equal(*logits)


def test_a_head_that_is_not_the_embedding(checkpoint: Any, spoil: Any) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    folder = spoil(checkpoint("gqa-tied"), add)
    with pytest.raises(
        ArgumentError, match=r"tie_word_embeddings = true: lm_head\.weight differs .*; give false"
    ):
        load_model(folder)


def test_weights_that_need_a_scale(checkpoint: Any, spoil: Any) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    with pytest.raises(
        ArgumentError, match=r"up_proj\.weight is stored in F8_E4M3; give weights in F64, F32"
    ):
        load_model(spoil(checkpoint("gqa-tied"), cast))


def test_a_weight_of_another_shape_is_named_with_both(checkpoint: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("gqa-tied"), tmp_path / "model"))
    change_config(folder, intermediate_size=100)
    with pytest.raises(
        ArgumentError, match=r"\w+_proj\.weight has shape \[.*\], but config\.json makes it \["
    ):
        load_model(folder)


def test_a_model_far_larger_than_its_weights_is_not_made(checkpoint: Any, tmp_path: Path) -> None:
    """2 TB of experts: their names in files are not those of the model, so only their sum tells."""
    folder = Path(shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "model"))
    change_config(folder, n_routed_experts=1 << 16, moe_intermediate_size=1 << 16, n_group=1, topk_group=1)
    with pytest.raises(ArgumentError, match=r"numbers, but the weights have|has shape \["):
        load_model(folder)
