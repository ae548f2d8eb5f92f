"""attend: what a model calls in each layer; append, then decode and prefill of one step."""

from __future__ import annotations

from kvgen.runtime.base import Tensor
from kvgen.runtime.cache import Cache, torch_dtype
from kvgen.runtime.ops import CacheOps
from kvgen.runtime.step import Step


def attend(
    library: CacheOps,
    cache: Cache,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    step: Step,
    *,
    scale: float | None = None,
) -> Tensor:
    """Write a step's keys and values into one layer's ``cache`` and attend to all keys of each request.

    q (T, q_heads, head_dim) of any float type; k (T, kv_heads, head_dim) and v (T, kv_heads, v_head_dim) of
    one type, f32, bf16 or f16; all with rotary embeddings applied. ``scale`` replaces the spec's.
    Returns (T, q_heads, v_head_dim) of q's type. Raises ``ArgumentError``.
    """
    att = library.spec.attention
    library.append(cache, k_THD, v_THD, step.slots_T)
    q = q_THD.to(torch_dtype(att.q_dtype))
    out = q.new_empty(q.shape[0], att.q_heads, att.v_head_dim)
    if part := step.decode_part:
        # The kernel for one row a request is the quicker one.
        starts = None if step.decode_rows == step.num_decode else part.q_starts_B1
        where = (part.page_table_BP, part.kv_lens_B, starts)
        library.decode(q[part.rows], cache, *where, out=out[part.rows], scale=scale)
    if part := step.prefill_part:
        where = (part.page_table_BP, part.kv_lens_B, part.q_starts_B1)
        library.prefill(q[part.rows], cache, *where, out=out[part.rows], scale=scale)
    return out.to(q_THD.dtype)
