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

    def new_cache(self, num_pages: int, *, scales: Any = None, layers: int = 1) -> Cache:
        return runtime_cache.new_cache(self.spec, self.record, num_pages, scales=scales, layers=layers)

    def adopt(self, *, scales: Any = None, **planes: torch.Tensor) -> Cache:
        return runtime_adopt.adopt(self.spec, self.record, scales=scales, **planes)

    def append(
        self,
        cache: Cache,
        k: torch.Tensor,
        v: torch.Tensor | None,
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        params: Any = None,
    ) -> None:
        where = (self.spec, self.record, self._pools(cache), cache.num_pages)
        reference.append(
            *where,
            to_numpy(k),
            None if v is None else to_numpy(v),
            slots.numpy(),
            scales=self._scales(cache),
            positions_T=None if positions is None else positions.numpy(),
            params=_arrays(params),
        )

    def gather(
        self, cache: Cache, table: torch.Tensor, lens: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, ...]:
        where = (self.spec, self.record, self._pools(cache), cache.num_pages)
        rows = reference.gather(*where, table.numpy(), lens.numpy(), scales=self._scales(cache))
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
            scales=self._scales(cache),
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

    def _scales(self, cache: Cache) -> dict[str, np.ndarray] | None:
        found = {}
        for side in self.spec.cache.fields:
            quant = self.spec.cache.quant(side)
            if quant.static_scale:
                scale = cache.planes[f"{side}_scale"].numpy()
                found[side] = scale if "head" in quant.scale_dims else scale.reshape(())
        return found or None
