"""A GGUF file of a Llama as a checkpoint folder: config.json, model.safetensors and a tokenizer.

Weights are dequantised and stored as f16: half the disk of f32, and a hundredth of the rounding that
4-bit weights went through before. GGUF's Llama keeps the rows of q and k as neighbouring RoPE pairs;
transformers rotates halves, so the rows are put back into its order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.errors import UnsupportedError
from kvgen.models.extras import require
from kvgen.models.folder_files import shown

if TYPE_CHECKING:
    import numpy as np

Advance = Callable[[int, int], None]
"""Called with the tensors done and their number."""

TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A block's tensors in GGUF -> in transformers."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside blocks."""

FIELDS = frozenset(
    f"llama.{name}"
    for name in (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    )
)
"""Metadata of a plain Llama; what says more changes its numbers."""

CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def convert(source: Path, folder: Path, advance: Advance = lambda done, total: None) -> None:
    """Write the model and the tokenizer of ``source`` into ``folder``, which exists and is empty.

    Raises ``UnsupportedError`` for another architecture or tokenizer than a Llama's.
    """
    require("gguf", "safetensors", "transformers", "tokenizers")
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise UnsupportedError(
            f"{source}: architecture {fields['general.architecture']}; only llama is read from GGUF"
        )
    _check_fields(fields, source)
    config = config_of(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _save_weights(reader.tensors, config, folder / "model.safetensors", advance)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _save_tokenizer(fields, source, folder)


def _check_fields(fields: dict[str, Any], source: Path) -> None:
    """Refuse metadata that a plain Llama's config does not hold (a window, scaled RoPE, experts)."""
    width = fields["llama.embedding_length"] // fields["llama.attention.head_count"]
    width = fields.get("llama.attention.key_length", width)
    same = {"llama.attention.value_length": width, "llama.rope.dimension_count": width}
    for name, value in fields.items():
        if name.startswith("llama.") and name not in FIELDS:
            raise UnsupportedError(f"{source}: {name} = {shown(value)}: a plain Llama has no such field")
        if value != same.get(name, value):
            raise UnsupportedError(f"{source}: {name} = {shown(value)}: the rows of K have {same[name]}")


def config_of(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """transformers' LlamaConfig as plain values, from GGUF's metadata."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", fields["llama.embedding_length"] // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
        "torch_dtype": "float16",
    }


def halves_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (heads * head_dim, in) from RoPE's neighbouring pairs to its two halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _save_weights(tensors: Any, config: dict[str, Any], path: Path, advance: Advance) -> None:
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, np.ndarray] = {}
    for done, tensor in enumerate(tensors):
        advance(done, len(tensors))
        name, kind = _renamed(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            values = halves_order(values, heads[kind])
        weights[name] = np.ascontiguousarray(values, dtype=np.float16)
    save_file(weights, path, metadata={"format": "pt"})
    advance(len(tensors), len(tensors))


def _renamed(name: str) -> tuple[str, str]:
    """transformers' name of a tensor, and GGUF's word for its kind."""
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in OUTER:
        return f"{OUTER[parts[0]]}.weight", parts[0]
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in TENSORS:
        return f"model.layers.{parts[1]}.{TENSORS[parts[2]]}.weight", parts[2]
    raise UnsupportedError(f"GGUF tensor {name}: a plain Llama has none such")


def _save_tokenizer(fields: dict[str, Any], source: Path, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UnsupportedError(f"{source}: tokenizer {kind[0]}/{kind[1]}; only gpt2/smollm is read from GGUF")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    named = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"))
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields["llama.context_length"],
        **named,
    )
    fast.save_pretrained(folder)
