"""A tiny Llama as a GGUF file, written as llama.cpp's converter writes one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CONFIG = {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
"""What ``make_checkpoint`` needs for the model that ``write_gguf`` takes."""

BLOCKS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, module: object, *, pre: str = "smollm", architecture: str = "llama", **fields: int
) -> None:
    """Write ``module`` (LlamaForCausalLM of ``CONFIG``, weights exact in f16) with a tokenizer of bytes.

    ``fields``: further metadata of the architecture, ``__`` standing for a dot.
    """
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    config = module.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in fields.items():
        writer.add_uint32(f"{architecture}.{name.replace('__', '.')}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    letters = sorted(ByteLevel.alphabet())
    writer.add_token_list(["<|end|>", "<|start|>", *letters, "ab"])
    writer.add_token_types([3, 3] + [1] * (len(letters) + 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}{% endfor %}")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in module.model.state_dict().items():
        values = tensor.numpy()
        if name.startswith("layers."):
            _, layer, kind = name.removesuffix(".weight").split(".", 2)
            short = BLOCKS[kind]
            if short in heads:
                values = pairs_order(values, heads[short])
            writer.add_tensor(f"blk.{layer}.{short}.weight", np.ascontiguousarray(values))
        else:
            outer = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
            writer.add_tensor(outer[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pairs_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation (convert_hf_to_gguf.py): halves become neighbouring pairs."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)
