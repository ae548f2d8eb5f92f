"""Malformed checkpoints: each is one line that names file, key, value, the reason and what works."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import ArgumentError, KvgenError, UnsupportedError
from kvgen.models.checkpoint import load_model, load_tokenizer
from kvgen.models.extras import installed
from kvgen.models.pages import specs_for
from kvgen.models.session import load
from kvgen.models.shape import read_config
from tests.models.test_checkpoint import change_config

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: list[tuple[str, str, dict[str, Any], str]] = [
    # Kinds and ranges, and sizes that nothing may be made of.
    (
        "gqa-tied",
        "num_hidden_layers",
        {"num_hidden_layers": 10**9},
        "too large; give an integer from 1 to 10,000",
    ),
    ("gqa-tied", "num_hidden_layers", {"num_hidden_layers": 9000}, "the weights have 2 layers; give 2"),
    ("gqa-tied", "num_hidden_layers", {"num_hidden_layers": 1}, "the weights have 2 layers; give 2"),
    ("gqa-tied", "num_hidden_layers", {"num_hidden_layers": None}, "not an integer"),
    ("gqa-tied", "vocab_size", {"vocab_size": 10**12}, "too large"),
    ("gqa-tied", "vocab_size", {"vocab_size": 10**9}, r"model\.embed_tokens\.weight has 97; give 97"),
    ("gqa-tied", "vocab_size", {"vocab_size": 97.0}, "not an integer"),
    ("gqa-tied", "hidden_size", {"hidden_size": "wide"}, "not an integer; give an integer from 1 to"),
    ("gqa-tied", "hidden_size", {"hidden_size": 128}, "embed_tokens.weight has 64; give 64"),
    ("gqa-tied", "head_dim", {"head_dim": -3}, "too small"),
    ("gqa-tied", "num_attention_heads", {"num_attention_heads": True}, "not an integer"),
    (
        "gqa-tied",
        "num_key_value_heads",
        {"num_key_value_heads": 3},
        "does not divide num_attention_heads = 4",
    ),
    ("gqa-tied", "max_position_embeddings", {"max_position_embeddings": 2**40}, "too large"),
    ("gqa-tied", "rms_norm_eps", {"rms_norm_eps": "small"}, "not a number; give a number from 0 to 1"),
    ("gqa-tied", "rms_norm_eps", {"rms_norm_eps": float("nan")}, "not a finite number"),
    ("gqa-tied", "hidden_act", {"hidden_act": "swish9"}, "no activation of transformers; give one of"),
    ("gqa-tied", "tie_word_embeddings", {"tie_word_embeddings": 1}, "not a boolean; give true or false"),
    ("gqa-tied", "architectures", {"architectures": "Llama"}, "not a list of strings"),
    (
        "gqa-tied",
        "pad_token_id",
        {"pad_token_id": 10**9},
        "the model has tokens 0 to 96; give a token's number",
    ),
    ("gqa-tied", "eos_token_id", {"eos_token_id": [3, "x"]}, "not an integer; give a token's number, a list"),
    # RoPE.
    ("gqa-tied", "rope_theta", {"rope_theta": "x"}, "not a number; give a number above 0"),
    ("gqa-tied", "rope_theta", {"rope_theta": None}, "not a number; give a number above 0"),
    ("gqa-tied", "rope_theta", {"rope_theta": 0}, "too small; give a number above 0"),
    ("gqa-tied", "rope_scaling", {"rope_scaling": "yarn"}, "not a JSON object; give a JSON object or null"),
    (
        "gqa-tied",
        "rope_parameters",
        {"rope_parameters": {"rope_theta": None}},
        "rope_theta = null: not a number",
    ),
    (
        "gqa-tied",
        "rope_parameters",
        {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "factor"}},
        "factor = null: RoPE of kind llama3 needs it; give a number above 0",
    ),
    (
        "gqa-tied",
        "rope_parameters",
        {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
        "high_freq_factor = 1.0: not above low_freq_factor",
    ),
    ("gemma3_text", "rope_local_base_freq", {"rope_local_base_freq": None}, "not a number"),
    # Layers and windows.
    (
        "mistral",
        "sliding_window",
        {"sliding_window": 0},
        "too small: it counts the query's own key; give an integer .* or null",
    ),
    ("mistral", "sliding_window", {"sliding_window": -1}, "too small"),
    ("mistral", "sliding_window", {"sliding_window": 4096.0}, "not an integer"),
    (
        "gemma2",
        "sliding_window",
        {"sliding_window": None},
        "layer_types has sliding_attention; give a number",
    ),
    (
        "qwen3",
        "sliding_window",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None},
        "layer_types has sliding_attention; give a number",
    ),
    (
        "qwen3",
        "use_sliding_window",
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": False},
        "layer_types has sliding_attention; give true",
    ),
    (
        "qwen3",
        "layer_types",
        {"layer_types": ["full_attention"]},
        r"not one entry for each layer \(num_hidden_layers = 2\); give 2",
    ),
    ("qwen3", "layer_types", {"layer_types": 5}, "not a list of strings"),
    (
        "gemma2",
        "attn_logit_softcapping",
        {"attn_logit_softcapping": 0},
        "too small; give a number above 0 or null",
    ),
    ("gemma2", "query_pre_attn_scalar", {"query_pre_attn_scalar": -24}, "too small"),
    ("gemma3_text", "sliding_window_pattern", {"sliding_window_pattern": 0}, "too small"),
    # Latents and experts.
    ("deepseek_v3", "kv_lora_rank", {"kv_lora_rank": "x"}, "not an integer"),
    ("deepseek_v3", "num_key_value_heads", {"num_key_value_heads": 2}, "give 4"),
    (
        "deepseek_v3",
        "num_experts_per_tok",
        {"num_experts_per_tok": 9},
        "more than the model has experts; give an integer from 1 to 4",
    ),
    ("deepseek_v3", "n_group", {"n_group": 3}, "does not divide 4 experts; give a divisor"),
    (
        "deepseek_v3",
        "topk_group",
        {"topk_group": 5},
        "more than the model has groups; give an integer from 1 to 1",
    ),
]


def spoilt(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def check_line(error: BaseException, folder: Path) -> str:
    """One line of bounded length that names the folder."""
    text = str(error)
    assert "\n" not in text and len(text) < 900 and str(folder) in text
    return text


@pytest.mark.parametrize(
    ("model", "key", "change", "match"),
    CONFIGS,
    ids=[f"{model}-{change}"[:70] for model, _, change, _ in CONFIGS],
)
def test_a_config_names_what_is_wrong(
    checkpoint: Any, tmp_path: Path, model: str, key: str, change: dict[str, Any], match: str
) -> None:
    folder = spoilt(checkpoint(model), tmp_path / "model")
    change_config(folder, **change)
    if any(name.startswith("rope_") for name in change):
        config = json.loads((folder / "config.json").read_text())
        other = {"rope_parameters"} - set(change)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in other}))
    with pytest.raises(ArgumentError, match=match) as caught:
        load_model(folder)
    assert f"config.json: {key}" in check_line(caught.value, folder)


def _bytes(name: str, data: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(data)


def _json(name: str, value: Any) -> Any:
    return _bytes(name, json.dumps(value).encode())


def _fifo(name: str) -> Any:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def _sparse(name: str, size: int) -> Any:
    def make(folder: Path) -> None:
        with (folder / name).open("ab") as stream:
            stream.truncate(size)

    return make


def _index(value: Any) -> Any:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(value))

    return make


INDEX = "model.safetensors.index.json"

FILES: list[tuple[str, Any, str]] = [
    ("config.json", _bytes("config.json", b"[" * 200_000), "more than 64 brackets around a value"),
    ("config.json", _bytes("config.json", b'{"a":' * 200_000), "more than 64 brackets"),
    ("config.json", _bytes("config.json", b"[]"), r"not a JSON object, but \[\]; write"),
    ("config.json", _bytes("config.json", b"\xff\xfe{}"), r"not UTF-8 \(byte 0 is 0xff\)"),
    (
        "config.json",
        _bytes("config.json", b'{"vocab_size": 97, "vocab_size": 98}'),
        "vocab_size.* appears twice",
    ),
    ("config.json", _bytes("config.json", b'{"x": ' + b"9" * 5000 + b"}"), "a number of 5,000 digits"),
    ("config.json", _sparse("config.json", 1 << 40), "1,099,511,627,776 bytes; at most"),
    ("config.json", _fifo("config.json"), "not an ordinary file"),
    ("generation_config.json", _json("generation_config.json", []), "not a JSON object"),
    (
        "generation_config.json",
        _json("generation_config.json", {"eos_token_id": "abc"}),
        'eos_token_id = "abc": not an integer; give a token',
    ),
    (
        "generation_config.json",
        _json("generation_config.json", {"eos_token_id": [1, 10**9]}),
        "the model has tokens 0 to 96",
    ),
    ("generation_config.json", _fifo("generation_config.json"), "not an ordinary file"),
    ("tokenizer_config.json", _json("tokenizer_config.json", []), "not a JSON object"),
    ("tokenizer_config.json", _bytes("tokenizer_config.json", b"[" * 200_000), "more than 64 brackets"),
    ("added_tokens.json", _json("added_tokens.json", [1]), "not a JSON object"),
    ("tokenizer.json", _sparse("tokenizer.json", 1 << 40), "bytes; at most"),
    (INDEX, _index([]), "not a JSON object"),
    (INDEX, _index({}), "weight_map = null: not a table"),
    (INDEX, _index({"weight_map": {"a": 5}}), "weight_map.a = 5: not the name of a file"),
    (INDEX, _index({"weight_map": {"a": "none.safetensors"}}), "names it, but it is missing"),
    (INDEX, _bytes("model.safetensors", (1 << 60).to_bytes(8, "little")), "cannot be read"),
]


@pytest.mark.parametrize(
    ("file", "spoil", "match"), FILES, ids=[f"{file}-{match}" for file, _, match in FILES]
)
def test_a_file_that_is_none_is_named(
    checkpoint: Any, tmp_path: Path, file: str, spoil: Any, match: str
) -> None:
    folder = spoilt(checkpoint("gqa-tied"), tmp_path / "model")
    spoil(folder)
    with pytest.raises(ArgumentError, match=match) as caught:
        load(str(folder), lambda *_: None)
    text = check_line(caught.value, folder)
    assert file in text or file == INDEX


def test_brackets_inside_strings_are_none(checkpoint: Any, tmp_path: Path) -> None:
    folder = spoilt(checkpoint("gqa-tied"), tmp_path / "model")
    change_config(folder, _name_or_path='a "' + "[" * 500 + "\\")
    assert len(load_model(folder).shape.layers) == 2


def test_names_that_others_chose_stay_on_their_line(checkpoint: Any, tmp_path: Path) -> None:
    """A name of 100,000 letters, or one that would go on in the next line or steer a terminal."""
    import torch
    from safetensors.torch import load_file, save_file

    names = ("scale" + "x" * 100_000, "scale\nerror: all is well", "scale\x1b[2J")
    for at, name in enumerate(names):
        for key in ("config", "rope", "weights", "index"):
            folder = spoilt(checkpoint("gqa-tied"), tmp_path / f"{key}-{at}")
            if key == "config":
                change_config(folder, **{name: 3})
            elif key == "rope":
                change_config(folder, rope_parameters={"rope_theta": 1e4, name: 3})
            elif key == "weights":
                tensors = load_file(folder / "model.safetensors") | {name: torch.ones(4)}
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            else:
                _index({"weight_map": {name: "../x"}})(folder)
            with pytest.raises(KvgenError) as caught:
                load_model(folder)
            text = check_line(caught.value, folder)
            assert text.isprintable() and '"scale' in text, (key, text)


ODD = (None, "x", -1, 0, 1e30, [], {}, True)


@pytest.mark.parametrize("model", ["gqa-tied", "llama3-rope-bias", "qwen3", "gemma3_text", "deepseek_v3"])
def test_no_odd_value_is_a_raw_error(checkpoint: Any, tmp_path: Path, model: str) -> None:
    """Each key of a config, and of its tables, in turn: it loads and computes, or says what is wrong."""
    import torch

    folder = spoilt(checkpoint(model), tmp_path / "model")
    whole = read_config(folder)
    refused = 0
    for path in _paths(whole):
        for odd in ODD:
            (folder / "config.json").write_text(json.dumps(_with(whole, path, odd)))
            try:
                loaded = load_model(folder)
                specs_for(loaded.shape)
                loaded.module.set_attn_implementation("eager")
                with torch.inference_mode():
                    loaded.module(torch.tensor([[1, 2, 3]]))
            except KvgenError as error:
                check_line(error, folder) if "spec" not in str(error) else None
                refused += 1
    assert refused > 100


def _paths(table: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in table.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += _paths(value, (*before, key))
    return found


def _with(table: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**table, key: _with(table[key], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "generation_config.json"])
def test_no_odd_value_beside_the_config_is_a_raw_error(checkpoint: Any, tmp_path: Path, name: str) -> None:
    folder = spoilt(checkpoint("gqa-tied"), tmp_path / "model")
    path = folder / name
    whole = json.loads(path.read_text()) if path.exists() else {"eos_token_id": 3}
    for key in [*whole, "eos_token_id", "chat_template", "fast_tokenizer_files"]:
        for odd in ODD:
            path.write_text(json.dumps({**whole, key: odd}))
            try:
                if name == "generation_config.json":
                    load_model(folder)
                else:
                    load_tokenizer(folder)("abc")
            except KvgenError as error:
                check_line(error, folder)


def test_other_words_are_refused_by_unsupported_error(checkpoint: Any, tmp_path: Path) -> None:
    folder = spoilt(checkpoint("gqa-tied"), tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"adapter_config\.json: adapters are not applied; merge it"):
        load_model(folder)
