"""attend: what a model calls in each layer; append, then decode and prefill of one step."""

from __future__ import annotations

from collections.abc import Mapping

from kvgen.runtime.base import Tensor
from kvgen.runtime.cache import torch_dtype
from kvgen.runtime.layers import Layer
from kvgen.runtime.params import ROPE
from kvgen.runtime.renamed import accept_former_names
from kvgen.runtime.step import Part, Step


@accept_former_names
def attend(
    layer: Layer,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    step: Step,
    *,
    scale: float | None = None,
    params: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Write a step's keys and values into one layer's cache and attend to all keys of each request.

    q (T, q_heads, head_dim) of any float type; k (T, kv_heads, head_dim) and v (T, kv_heads, v_head_dim) of
    one type, f32, bf16 or f16; v is None where the spec's V is a part of K. Both q and k are rotated already,
    but for a k that the spec rotates. ``scale`` replaces the spec's; ``params`` are those that the spec
    declares, with the step's requests and rows in their ``batch`` and ``q`` dims, and ``rope_table`` where it
    rotates. Returns (T, q_heads, v_head_dim) of q's type. Raises ``ArgumentError``.
    """
    library, cache = layer.library, layer.cache
    att = library.spec.attention
    turned = None
    if att.rope is not None and att.rope.stored == "post":
        params = dict(params or {})
        turned = {ROPE.name: params.pop(ROPE.name)} if ROPE.name in params else {}
    if library.spec.cache.raw is not None:
        table, lens, starts = step.page_table_BP, step.kv_lens_B, step.q_starts_B1
        tables = {"page_table": table, "kv_lens": lens, "q_starts": starts}
        library.append(cache, k, v, **tables, params=turned)
    elif turned is not None:
        library.append(cache, k, v, step.slots_T, step.positions32_T, params=turned)
    else:
        library.append(cache, k, v, step.slots_T)
    q_THD = q.to(torch_dtype(att.q_dtype))
    out = q_THD.new_empty(q_THD.shape[0], att.q_heads, att.v_head_dim)
    if part := step.decode_part:
        # The kernel for one row a request is the quicker one.
        starts = None if step.decode_rows == step.num_decode else part.q_starts_B1
        where = (part.page_table_BP, part.kv_lens_B, starts)
        own = _of_part(layer, params, part)
        library.decode(q_THD[part.rows], cache, *where, out=out[part.rows], scale=scale, params=own)
    if part := step.prefill_part:
        where = (part.page_table_BP, part.kv_lens_B, part.q_starts_B1)
        own = _of_part(layer, params, part)
        library.prefill(q_THD[part.rows], cache, *where, out=out[part.rows], scale=scale, params=own)
    return out.to(q.dtype)


def _of_part(layer: Layer, params: Mapping[str, Tensor] | None, part: Part) -> Mapping[str, Tensor] | None:
    """Of each parameter what belongs to the requests and rows of ``part``."""
    if not params:
        return params
    cuts = {"batch": part.requests, "q": part.rows}
    dims = {param.name: param.dims for param in layer.library.spec.attention.params}
    return {
        name: tensor[tuple(cuts.get(dim, slice(None)) for dim in dims[name])] if name in dims else tensor
        for name, tensor in params.items()
    }
