"""What a checkpoint says and kvgen does not do is refused by name; harmless leftovers pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError, KvgenError, UnsupportedError
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.families import FAMILIES
from kvgen.models.other_keys import EMPTY
from kvgen.models.shape import CheckpointWarning, check_supported, shape_of
from tests.models.test_checkpoint import change_config
from tests.models.test_shape import HERE, LATENT, LLAMA, of
from tests.support.checkpoints import FAMILY_SHAPES, make_checkpoint

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

Spoil = Callable[[Any, Path], Path]


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


def test_a_layer_that_guesses_ahead_is_left_out(checkpoint: Any, spoil: Any) -> None:
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


def test_a_model_far_larger_than_its_weights_is_not_made(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 TB of experts: their names in files are not those of the model, so only their sum tells."""
    folder = Path(shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "model"))
    change_config(folder, n_routed_experts=1 << 16, moe_intermediate_size=1 << 16, n_group=1, topk_group=1)
    with pytest.raises(ArgumentError, match=r"numbers, but the weights have|has shape \["):
        load_model(folder)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (LLAMA | {"is_causal": False}, "is_causal = false: an engine computes prompts in chunks"),
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
            "RoPE of kind mrope: a token has three positions there",
        ),
        (LLAMA | {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "RoPE of kind mrope"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "default", "factor": 4.0}},
            "no setting of RoPE of kind default",
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
