"""Specs of attention variants in few words, for tests of Triton kernels."""

from __future__ import annotations

from typing import Any

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.support.specs import FORMAT_TABLES

LATENT = {"alias": "k"}


def variant_spec(
    *,
    k: str = "bf16",
    v: str | dict[str, str] = "bf16",
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    q_dtype: str = "f16",
    **attention: Any,
) -> Spec:
    """A spec; other keywords are keys of ``[attention]``."""
    heads = {"q_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim, "q_dtype": q_dtype}
    layout = "page head tok d" if isinstance(v, dict) else "page kv head tok d"
    sides = {"k": FORMAT_TABLES[k], "v": v if isinstance(v, dict) else FORMAT_TABLES[v]}
    cache = {"page_size": page_size, "layout": layout, **sides}
    return load_spec({"name": "variant", "attention": heads | attention, "cache": cache})


def llama(**keys: Any) -> Spec:
    """The Llama-3-8B shape in bf16: 32 query and 8 KV heads of 128, page 16."""
    return variant_spec(**{"kv_heads": 8, "group": 4, "head_dim": 128, "q_dtype": "bf16", **keys})


def deepseek(**keys: Any) -> Spec:
    """Absorbed MLA: one row of 512 + 64 a token, V its first 512; page 64."""
    shape = {"kv_heads": 1, "group": 16, "head_dim": 576, "v_head_dim": 512, "page_size": 64}
    return variant_spec(**{**shape, "v": LATENT, "q_dtype": "bf16", **keys})


def unturned(**keys: Any) -> dict[str, Any]:
    """``[attention.rope]`` of keys that are stored unrotated."""
    return {"kind": "default", "theta": 1e4, "stored": "pre", **keys}
