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
from kvgen.tune.given import as_given, given_means, given_scales
from kvgen.tune.raw_rows import raw_rows_of
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


def raw_views(record: PageRecord, flat: np.ndarray) -> dict[str, torch.Tensor]:
    """The planes of raw rows as typed views over their slab (uint8), for ``adopt``."""
    rows = len(flat) // record.raw_bytes() if record.raw else 0
    views = {}
    for plane in record.raw:
        typed = torch.from_numpy(flat).view(torch_dtype(plane.dtype))
        offset = plane.offset.fixed // plane.itemsize
        views[plane.name] = typed.as_strided(plane.shape(rows), plane.strides(rows), offset)
    return views


def static_scales(spec: Spec, seed: int = 0) -> dict[str, torch.Tensor] | None:
    """Scales for the formats that need them given, so that N(0, 1) fills the codes and some saturate."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for plane, values in given_scales(spec).items():
        share = torch.rand(values.shape, generator=generator) * 0.65 + 0.65
        found[plane] = torch.from_numpy(np.array(values)) * share
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
        raw_rows: int = 0,
    ) -> None:
        """``raw_rows``: how many there are, where the spec keeps tokens raw; ``hold_raw`` hands them out."""
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
        self.means = given_means(self.spec, seed)
        planes = plane_views(self.record, num_pages, self.bytes)
        if self.record.raw:
            size = raw_rows * self.record.raw_bytes()
            self.bytes["raw"] = poisoned([size], torch.uint8, where, align).fill_(0xFF).numpy()
            planes |= raw_views(self.record, self.bytes["raw"])
            planes["raw_rows"] = self.ints([-1] * num_pages)
        given = as_given({}, self.means)
        self.cache: Cache = lib.adopt(scales=scales, means=given["means"], **planes)
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

    def hold_raw(self, table: torch.Tensor, lens: Sequence[int], *more: Sequence[int]) -> None:
        """Give the pages that hold raw tokens at these lengths (and at ``more``) their raw rows, permuted."""
        ids = [row[: -(-max(ns) // self.page)] for row, *ns in zip(table.tolist(), lens, *more, strict=True)]
        every = [(row, n) for ns in (lens, *more) for row, n in zip(ids, ns, strict=True)]
        rows, _ = raw_rows_of(
            self.spec.cache.raw, [row for row, _ in every], [n for _, n in every], self.num_pages, self.seed
        )
        self.cache.planes["raw_rows"].copy_(torch.from_numpy(rows))

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
