"""names: what people call things elsewhere, and what kvgen calls them.

One table, read by every hint: PyTorch's, vLLM's, FlashInfer's, llama.cpp's and transformers' words for number
formats, keys, axes and the indices of a mask. Nothing here is accepted in place of the right name: a hint
says which one is meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

FORMATS = {
    "float64": "f32", "fp64": "f32", "f64": "f32", "double": "f32", "float32": "f32", "fp32": "f32",
    "float": "f32", "single": "f32",
    "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16", "bfloat": "bf16", "auto": "bf16",
    "fp8": "e4m3", "float8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e4m3fn": "e4m3", "float8_e4m3": "e4m3",
    "float8_e4m3fn": "e4m3", "e4m3fn": "e4m3", "fp8e4nv": "e4m3", "fp8_ds_mla": "e4m3",
    "fp8_e5m2": "e5m2", "float8_e5m2": "e5m2", "fp8e5": "e5m2",
    "fp4": "e2m1", "fp4_e2m1": "e2m1", "float4_e2m1": "e2m1", "mx_fp4": "mxfp4", "mx_fp8": "mxfp8",
    "i8": "int8", "s8": "int8", "q8": "int8", "q8_0": "int8", "uint8": "int8", "u8": "int8", "8bit": "int8",
    "i4": "int4", "q4": "int4", "q4_0": "int4", "q4_1": "int4", "uint4": "int4", "u4": "int4", "4bit": "int4",
    "kivi": "int4", "nf4": "table", "q3": "int3", "q2": "int2", "2bit": "int2", "codebook": "table",
    "nv_fp4": "nvfp4", "float8_e8m0fnu": "e8m0", "ue8m0": "e8m0",
}  # fmt: skip
"""Number formats, of K and V, of queries and of scales."""

KEYS = {
    "dtype": "format", "type": "format", "kv_cache_dtype": "format", "cache_dtype": "format",
    "quant": "format", "codec": "format", "bits": "format",
    "group_size": "group", "block": "group", "granularity": "group", "symmetric": "affine",
    "asymmetric": "affine", "zero_point": "affine", "scale_type": "scale_dtype", "rotate": "transform",
    "num_heads": "q_heads", "n_heads": "q_heads", "heads": "q_heads", "num_q_heads": "q_heads",
    "num_qo_heads": "q_heads", "num_attention_heads": "q_heads", "n_head": "q_heads",
    "num_kv_heads": "kv_heads", "n_kv_heads": "kv_heads", "num_key_value_heads": "kv_heads",
    "n_head_kv": "kv_heads", "head_size": "head_dim", "headdim": "head_dim", "dim": "head_dim",
    "head_dim_qk": "head_dim", "head_dim_vo": "v_head_dim", "head_dim_v": "v_head_dim",
    "q_data_type": "q_dtype", "query_dtype": "q_dtype", "sm_scale": "scale", "softmax_scale": "scale",
    "scaling": "scale", "is_causal": "causal", "sliding_window": "window", "window_size": "window",
    "window_left": "window", "softcap": "soft_cap", "logits_soft_cap": "soft_cap",
    "attn_logit_softcapping": "soft_cap", "alibi_slopes": "alibi", "sinks": "sink_logit",
    "s_aux": "sink_logit", "sink": "sink_logit", "score_mod": "score", "mask_mod": "mask",
    "attn_mask": "mask", "bias": "score",
    "rope_scaling": "rope", "rope_theta": "theta", "base": "theta", "rope_type": "kind",
    "rotary_dim": "dim", "block_size": "page_size", "page_len": "page_size", "tokens_per_block": "page_size",
    "alignment": "align", "kv_layout": "layout", "sink_tokens": "keep_first", "residual_length": "keep_last",
    "recent": "keep_last", "key": "k", "keys": "k", "value": "v", "values": "v",
    "attn": "attention", "model": "attention", "kv_cache": "cache", "kvcache": "cache",
    "tokens": "tok", "token": "tok", "heads_per_group": "head", "channel": "d", "channels": "d",
    "shape": "dims", "axes": "dims",
}  # fmt: skip
"""Keys of a spec. Where one word means two things, the nearest key that the table at hand has."""

MORE_KEYS = {"dtype": "q_dtype", "type": "kind", "heads": "head", "dim": "d", "block_size": "tok"}
"""The same words in tables where ``KEYS`` does not help."""

AXES = {
    "page": "page", "pages": "page", "num_pages": "page", "max_num_pages": "page", "block": "page",
    "blocks": "page", "num_blocks": "page", "nb": "page", "kv": "kv", "2": "kv", "two": "kv",
    "head": "head", "heads": "head", "h": "head", "kv_heads": "head", "num_kv_heads": "head",
    "num_heads": "head", "n_kv_heads": "head", "hkv": "head", "tok": "tok", "token": "tok", "tokens": "tok",
    "t": "tok", "n": "tok", "slot": "tok", "seq": "tok", "block_size": "tok", "page_size": "tok",
    "d": "d", "dim": "d", "head_dim": "d", "head_size": "d", "hd": "d", "channel": "d",
}  # fmt: skip
"""Axes of a layout, as engines write them."""

LAYOUTS = {"nhd": "page kv tok head d", "hnd": "page kv head tok d"}
"""Layouts that have a name: FlashInfer's and vLLM's."""

INDICES = {
    "q_idx": "q_pos", "q_index": "q_pos", "query_idx": "q_pos", "q_position": "q_pos", "query_pos": "q_pos",
    "i": "q_pos", "m": "q_pos", "qo_idx": "q_pos", "kv_idx": "kv_pos", "kv_index": "kv_pos",
    "k_idx": "kv_pos", "key_idx": "kv_pos", "k_pos": "kv_pos", "key_pos": "kv_pos", "kv_position": "kv_pos",
    "j": "kv_pos", "n": "kv_pos", "b": "batch", "batch_idx": "batch", "request": "batch", "h": "head",
    "head_idx": "head", "q_head": "head", "qo_head_idx": "head", "kv_head_idx": "kv_head",
    "seq_len": "kv_len", "seqlen": "kv_len", "kv_length": "kv_len", "q_length": "q_len",
    "s": "score", "logits": "score", "logit": "score",
}  # fmt: skip
"""Names inside masks and scores: flex_attention's, FlashInfer's and those of papers."""

FUNCTIONS = {
    "maximum": "max", "minimum": "min", "clamp": "min", "fabs": "abs", "select": "where", "if": "where",
    "logical_and": "where", "pow": "exp2", "ln": "log", "expf": "exp", "cast": "float", "sqr": "sqrt",
}  # fmt: skip
"""Functions of masks and scores."""

LISTS = {
    "codecs": "formats", "codec": "formats", "dtypes": "formats", "types": "formats", "kernels": "ops",
    "operations": "ops", "ropes": "positions", "rope": "positions", "examples": "specs", "models": "specs",
    "knobs": "schedules", "gpus": "targets", "devices": "targets", "backends": "targets",
}  # fmt: skip
"""What ``kvgen list`` lists."""

TARGETS = {
    "avx512": "cpu-avx512", "avx2": "cpu-avx2", "portable": "cpu-portable", "x86": "cpu", "x86_64": "cpu",
    "gpu": "cuda", "nvidia": "cuda", "rocm": "hip", "amd": "hip", "a100": "sm_80", "ampere": "sm_80",
    "l40s": "sm_89", "ada": "sm_89", "h100": "sm_90", "h200": "sm_90", "hopper": "sm_90", "b200": "sm_100",
    "blackwell": "sm_100", "rtx5090": "sm_120", "mi300x": "gfx942", "mi300": "gfx942", "triton": "interpret",
}  # fmt: skip
"""Machines."""

FORMAT, KEY, INDEX, FUNCTION, LIST, TARGET = (
    (FORMATS,),
    (KEYS, MORE_KEYS),
    (INDICES,),
    (FUNCTIONS,),
    (LISTS,),
    (TARGETS,),
)
"""Kinds of names, for ``suggest``."""


def suggest(
    name: Any, known: Collection[str], kind: tuple[Mapping[str, str], ...] = (), *, guess: bool = True
) -> str | None:
    """The one of ``known`` that is meant by ``name``; None where nothing resembles it.

    Spelling first (capitals, blanks, ``torch.``), then what others call it, then (``guess``) the nearest by
    letters.
    """
    if not isinstance(name, str):
        return None
    plain = _plain(name)
    folded = {_plain(each): each for each in reversed([*known])}
    if plain in folded:
        return folded[plain]
    for table in kind:
        if (meant := table.get(plain)) in known:
            return meant
    # Of a long name only the start is compared: the time grows with the square of the length.
    near = difflib.get_close_matches(plain, folded, 1, 0.5) if guess else []
    return folded[near[0]] if near else None


def _plain(name: str) -> str:
    text = re.sub(r"[\s.-]+", "_", name[:40].strip(" \t\n'\"").lower().removeprefix("torch."))
    return text.strip("_")


def told(name: Any, known: Collection[str], kind: tuple[Mapping[str, str], ...] = ()) -> str:
    """``did you mean X? `` of ``suggest``, to stand before the list of what there is; empty where none is."""
    meant = suggest(name, known, kind)
    return f"did you mean {meant}? " if meant else ""


def layout_of(text: Any) -> str | None:
    """The layout string that is meant by an engine's way of writing one; None where none is.

    ``[2, num_blocks, block_size, kv_heads, head_dim]``, ``NHD``, commas and capitals; an axis that is divided
    by ``x`` is split by 8.
    """
    if isinstance(text, str):
        text = re.split(r"[\s,()\[\]]+", text)
    words = text if isinstance(text, list) else []
    words = [str(word).strip().lower() for word in words[:20] if str(word).strip()]
    if len(words) == 1 and words[0] in LAYOUTS:
        return LAYOUTS[words[0]]
    found, split = [], ("d", "8")
    for word in words:
        cut = re.fullmatch(r"(\w+?)\s*(//?|%)\s*(\w+)", word)
        name, mark, block = cut.groups() if cut else (word, "", "")
        if name == "x" and not cut:
            found.append("{}%{}".format(*split))
        elif name not in AXES:
            return None
        elif mark:
            split = (AXES[name], block if block.isdigit() else "8")
            found.append(f"{split[0]}{mark[0]}{split[1]}")
        else:
            found.append(AXES[name])
    return " ".join(found) or None
