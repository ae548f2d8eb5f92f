"""A hostile world for a cache: poison wherever nobody wrote, guard pages behind every buffer.

Every byte of a pool starts as 0xFF (a NaN for floats and for scales), page ids are permuted, pages are shared
between requests, and what follows the last page of a table row are numbers no pool has. Buffers end, or
begin, at a page that may not be touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from kvgen.ir import PageRecord, Spec
from kvgen.passes.place import place
from kvgen.runtime.cache import Cache, torch_dtype
from tests.support.guard import guarded_tensor

Where = Literal["end", "begin", "heap"]
"""Which end of a buffer touches its guard page; ``heap`` has none, but the sanitizer's red zones."""
HUGE_IDS = (2**31 - 1, -(2**31), -1, 10**9)
"""What table tails hold: reading through any of them faults or finds nothing."""


def plane_views(record: PageRecord, num_pages: int, bytes_of: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The planes of a record as typed views over pools (uint8 arrays), for ``adopt``."""
    views = {}
    for plane in record.planes:
        flat = torch.from_numpy(bytes_of[plane.pool]).view(torch_dtype(plane.dtype))
        offset = plane.offset.at(num_pages) // plane.itemsize
        views[plane.name] = flat.as_strided(plane.shape(num_pages), plane.strides(num_pages), offset)
    return views


def static_scales(spec: Spec, seed: int = 0) -> dict[str, torch.Tensor] | None:
    """Scales for the formats that need them given, so that N(0, 1) fills the codes and some saturate."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for side in ("k", "v"):
        quant = spec.cache.quant(side)
        if quant.static_scale:
            count = (spec.attention.kv_heads,) if "head" in quant.scale_dims else ()
            found[side] = (torch.rand(count, generator=generator) * 0.02 + 0.02) * (127 / quant.fmt.qmax)
    return found or None


def poisoned(shape: Sequence[int], dtype: torch.dtype, where: Where, align: int = 0) -> torch.Tensor:
    """A contiguous tensor of 0xFF bytes (integers: of the largest value) in its own guarded memory."""
    if where != "heap":
        return guarded_tensor(tuple(shape), dtype, where, align or dtype.itemsize)
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF)
    return tensor


class World:
    """A poisoned cache and tensors in guarded memory. The same for a library and for the oracle."""

    def __init__(
        self,
        lib: Any,
        num_pages: int,
        *,
        where: Where = "end",
        scales: Mapping[str, torch.Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.lib, self.spec, self.where, self.seed = lib, lib.spec, where, seed
        self.record = place(self.spec)
        self.num_pages = num_pages
        self.rng = np.random.default_rng(seed)
        # Triton kernels are promised 16 bytes; less lets a pool of any size end at its guard page.
        align = 16 if getattr(getattr(lib, "target", None), "interpreted", False) else 4
        self.bytes = {
            name: poisoned([size.at(num_pages)], torch.uint8, where, align).fill_(0xFF).numpy()
            for name, size in self.record.pools
        }
        scales = static_scales(self.spec, seed) if scales is None else scales
        self.cache: Cache = lib.adopt(scales=scales, **plane_views(self.record, num_pages, self.bytes))
        self.cache.pools = {name: torch.from_numpy(flat) for name, flat in self.bytes.items()}

    @property
    def page(self) -> int:
        return self.spec.cache.page_size

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of ``value`` whose buffer touches a guard page."""
        copy = poisoned(value.shape, value.dtype, self.where)
        return copy.copy_(value) if value.numel() else copy

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A guarded tensor of integers."""
        return self.tensor(torch.tensor(list(values), dtype=dtype))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """A guarded tensor of normal numbers."""
        return self.tensor(torch.from_numpy(self.rng.normal(0, scale, shape)).to(dtype))

    def query(self, rows: int, scale: float = 1.0) -> torch.Tensor:
        """Queries of the spec's type."""
        att = self.spec.attention
        return self.normal(rows, att.q_heads, att.head_dim, dtype=torch_dtype(att.q_dtype), scale=scale)

    def outputs(self, rows: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """``out=`` and ``lse=`` full of NaN."""
        att = self.spec.attention
        dtype = dtype or torch_dtype(att.q_dtype)
        out = poisoned((rows, att.q_heads, att.v_head_dim), dtype, self.where)
        return {"out": out, "lse": poisoned((rows, att.q_heads), torch.float32, self.where)}

    def table(self, lens: Sequence[int], *, shared: bool = False, tail: int = 2) -> torch.Tensor:
        """A page table for requests of these lengths: permuted ids, then ``tail`` columns of nonsense.

        ``shared``: requests after the first begin with whole pages of the first one where both have any.
        """
        counts = [-(-n // self.page) for n in lens]
        ids = iter(self.rng.permutation(self.num_pages).tolist())
        rows = [[next(ids) for _ in range(n)] for n in counts]
        for b in range(1, len(lens) if shared else 0):
            common = min(lens[0] // self.page, lens[b] // self.page, b)
            rows[b][:common] = rows[0][:common]
        width = max(counts, default=0) + tail
        nonsense = [HUGE_IDS[i % len(HUGE_IDS)] for i in range(width)]
        return self.tensor(
            torch.tensor([row + nonsense[len(row) :] for row in rows], dtype=torch.int32).reshape(-1, width)
        )

    def slots(self, table: torch.Tensor, lens: Sequence[int]) -> list[int]:
        """The slot of every token of every request; a token of a shared page once."""
        rows = table.tolist()
        found = [
            rows[b][t // self.page] * self.page + t % self.page for b, n in enumerate(lens) for t in range(n)
        ]
        return list(dict.fromkeys(found))

    def fill(
        self, table: torch.Tensor, lens: Sequence[int], dtype: torch.dtype = torch.float32, **kv: torch.Tensor
    ) -> None:
        """Append a whole batch: given ``k`` and ``v`` in token order, or random ones."""
        slots, att = self.slots(table, lens), self.spec.attention
        rows = {
            side: self.tensor(kv[side].to(dtype))
            if side in kv
            else self.normal(len(slots), att.kv_heads, width, dtype=dtype)
            for side, width in (("k", att.head_dim), ("v", att.v_head_dim))
        }
        self.lib.append(self.cache, rows["k"], rows["v"], self.ints(slots, torch.int64))

    def snapshot(self) -> dict[str, np.ndarray]:
        """The bytes of all pools as they are now."""
        return {name: flat.copy() for name, flat in self.bytes.items()}

    def changed(self, before: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Offsets of the bytes of each pool that differ from a snapshot."""
        return {name: np.flatnonzero(self.bytes[name] != before[name]) for name in before}
