"""DeepSeek's latent attention (MLA) on cached latents: queries take W_UK in, outputs take W_UV after.

A head's key is W_UK c, its value W_UV c, c being the token's latent. So q.(W_UK c) = (W_UK' q).c, and a sum
of values is W_UV times the same sum of latents: attention runs on one row (c, rotated part) a token, for all
heads, and K and V are never written out. transformers hands both parts to the cache before it expands them.
"""

from __future__ import annotations

from typing import Any

from kvgen.runtime.base import Tensor


def latent_row(latent_1HTD: Tensor, rotated_1HTD: Tensor) -> Tensor:
    """The rows to cache (T, 1, kv_lora_rank + qk_rope_head_dim)."""
    import torch

    return torch.cat([latent_1HTD[0], rotated_1HTD[0]], -1).transpose(0, 1)


def absorb(module: Any, q_THD: Tensor) -> Tensor:
    """Queries (T, heads, qk_nope_head_dim + qk_rope_head_dim) as queries of latent rows."""
    import torch

    w_HDC = _weights(module)[:, : module.qk_nope_head_dim]
    plain, rotated = q_THD.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([torch.einsum("thd,hdc->thc", plain, w_HDC), rotated], -1)


def expand(module: Any, out_THC: Tensor) -> Tensor:
    """Sums of latents (T, heads, kv_lora_rank) as sums of values (T, heads, v_head_dim)."""
    import torch

    return torch.einsum("thc,hdc->thd", out_THC, _weights(module)[:, module.qk_nope_head_dim :])


def _weights(module: Any) -> Tensor:
    """W_UK and W_UV of each head: (heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)."""
    return module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1))
