"""The oracle behind the interface of a library, so that a test runs on it as on any backend.

Tensors in, tensors out; the work is ``kvgen.reference`` on the bytes of the cache's pools. Attention gives
float64, which no kernel's rounding has touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvgen import reference
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.runtime import adopt as runtime_adopt
from kvgen.runtime import cache as runtime_cache
from kvgen.runtime.cache import Cache, torch_dtype


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A float tensor as numpy; bf16 as the uint16 that the oracle takes for it."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _arrays(params: Any) -> dict[str, np.ndarray] | None:
    return None if params is None else {name: tensor.numpy() for name, tensor in params.items()}


class OracleLibrary:
    """The six ops of a spec, computed by ``kvgen.reference``."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.record = place(spec)

    def new_cache(self, num_pages: int, **options: Any) -> Cache:
        return runtime_cache.new_cache(self.spec, self.record, num_pages, **options)

    def adopt(self, *, scales: Any = None, means: Any = None, **planes: torch.Tensor) -> Cache:
        return runtime_adopt.adopt(self.spec, self.record, scales=scales, means=means, **planes)

    def append(
        self,
        cache: Cache,
        k: torch.Tensor,
        v: torch.Tensor | None,
        slots: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *,
        params: Any = None,
        page_table: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_starts: torch.Tensor | None = None,
    ) -> None:
        where = (self.spec, self.record, self._pools(cache), cache.num_pages)
        rows = (to_numpy(k), None if v is None else to_numpy(v))
        given = known(cache)
        if slots is None:
            assert page_table is not None and kv_lens is not None and q_starts is not None
            tables = (page_table.numpy(), kv_lens.numpy(), q_starts.numpy())
            reference.append_requests(*where, *rows, *tables, **given, params=_arrays(params))
            return
        places = None if positions is None else positions.numpy()
        given |= {"positions_T": places, "params": _arrays(params)}
        reference.append(*where, *rows, slots.numpy(), **given)

    def gather(
        self, cache: Cache, table: torch.Tensor, lens: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, ...]:
        where = (self.spec, self.record, self._pools(cache), cache.num_pages)
        rows = reference.gather(*where, table.numpy(), lens.numpy(), **known(cache))
        att = self.spec.attention
        found = []
        for side, width in zip(rows, (att.head_dim, att.v_head_dim), strict=True):
            joined = np.concatenate([np.zeros((0, att.kv_heads, width)), *side])
            # Kernels multiply code and scale in f32; the product of f64 rounded to f32 is the same number.
            found.append(torch.from_numpy(joined).float().to(dtype or torch_dtype(att.q_dtype)))
        return tuple(found)

    def decode(
        self,
        q: torch.Tensor,
        cache: Cache,
        table: torch.Tensor,
        lens: torch.Tensor,
        q_starts: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        where = (self.spec, self.record, self._pools(cache), cache.num_pages)
        out, lse = reference.decode(
            *where,
            table.numpy(),
            lens.numpy(),
            to_numpy(q),
            None if q_starts is None else q_starts.numpy(),
            **known(cache),
            scale=options.get("scale"),
            params=_arrays(options.get("params")),
            finalize=options.get("finalize", True),
        )
        return torch.from_numpy(out), torch.from_numpy(lse)

    prefill = decode

    def merge(
        self, outs: torch.Tensor, lses: torch.Tensor, *, out: Any = None, lse: Any = None, params: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sink = None if params is None else params["sink_logit"].numpy()
        found, sums = map(torch.from_numpy, reference.merge(to_numpy(outs), lses.numpy(), sink))
        if out is None:
            return found, sums
        return out.copy_(found), lse.copy_(sums)

    def copy(self, cache: Cache, src: torch.Tensor, dst: torch.Tensor) -> None:
        reference.copy(self.record, self._pools(cache), cache.num_pages, src.numpy(), dst.numpy())

    def _pools(self, cache: Cache) -> dict[str, np.ndarray]:
        return {name: slab.numpy() for name, slab in cache.pools.items()}


def known(cache: Cache) -> dict[str, Any]:
    """What the oracle's ops take beside the buffers of a cache: given scales, means, raw rows."""
    spec, scales = cache.spec, {}
    for name, _, per_head in spec.given_scales():
        values = cache.planes[name].numpy()
        scales[name.rpartition("_")[0]] = values if per_head else values.reshape(())
    found: dict[str, Any] = {"scales": scales}
    if spec.cache.k.mean:
        found["means"] = {"k": cache.planes["k_mean"].numpy()}
    if spec.cache.raw is not None:
        found["raw_rows"] = cache.planes["raw_rows"].numpy()
    return found
