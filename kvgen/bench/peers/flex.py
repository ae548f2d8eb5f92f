"""torch's flex_attention, compiled, over pages: its block mask lists the pages of each request.

K and V lie as [1, kv_heads, pages * page, d], as torch's own paged attention has them. A page is a block of
the mask; blocks in which some keys are hidden find the place of a key in its request by a table.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from kvgen.bench.contender import Scene, Tensor, torch_type
from kvgen.bench.expect import ROUNDING
from kvgen.errors import UnsupportedError

PAGE = 128
"""Tokens of a page, and keys of a block of the mask: flex_attention's own default."""


@functools.cache
def compiled() -> Any:
    """flex_attention, compiled anew for each shape; an error, not a silent fallback, where that fails."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


class Flex:
    """Decode and prefill of requests of one length."""

    def __init__(self, scene: Scene, form: str, name: str) -> None:
        if not scene.shape.plain:
            raise UnsupportedError("compared only where attention is causal and has no window")
        if len(scene.case.groups) > 1:
            raise UnsupportedError("one call takes requests of one length only")
        self.scene, self.format, self.name, self.tolerance = scene, form, name, ROUNDING[form]
        (self._batch, self._queries, self._keys), shape = scene.case.groups[0], scene.shape
        self._dtype = torch_type(form)
        row = shape.kv_heads * (shape.head_dim + shape.v_head_dim) * self._dtype.itemsize
        self.nbytes = scene.case.keys * row
        self.sets = scene.sets(self.nbytes)
        self._width = -(-self._keys // PAGE)
        _forget()
        self._fill()
        q = scene.q.to(self._dtype).view(self._batch, self._queries, shape.q_heads, shape.head_dim)
        self._q = q.transpose(1, 2).contiguous()
        self._out: Tensor = None

    def call(self, turn: int) -> None:
        """One attention."""
        mask, scale = self._masks[turn % self.sets], self.scene.shape.scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inductor's advice to the one who compiles
            self._out = compiled()(self._q, self._k, self._v, block_mask=mask, scale=scale, enable_gqa=True)

    def results(self, turn: int) -> dict[str, Tensor]:
        """The outputs as rows of queries."""
        return {"out": self._out.transpose(1, 2).flatten(0, 1)}

    def _fill(self) -> None:
        """Pages at random places of one pool, and a mask for each set."""
        import torch

        scene, shape, each = self.scene, self.scene.shape, self._batch * self._width
        total = each * self.sets
        order = torch.randperm(total, generator=scene.random).view(self.sets, self._batch, self._width)
        planes = []
        for rows, width in ((scene.k, shape.head_dim), (scene.v, shape.v_head_dim)):
            plane = scene.empty(shape.kv_heads, total, PAGE, width, dtype=self._dtype)
            padded = rows.new_zeros(self._batch, self._width * PAGE, shape.kv_heads, width)
            padded[:, : self._keys] = rows.view(self._batch, self._keys, shape.kv_heads, width)
            pages = padded.view(each, PAGE, shape.kv_heads, width).permute(2, 0, 1, 3).to(self._dtype)
            for table in order:
                plane[:, table.reshape(-1)] = pages
            planes.append(plane.view(1, shape.kv_heads, total * PAGE, width))
        self._k, self._v = planes
        self._masks = [self._mask(table.int(), total) for table in order]

    def _mask(self, table: Tensor, total: int) -> Any:
        """The block mask of one set, whose page table [requests, pages] is given."""
        import torch
        from torch.nn.attention.flex_attention import BlockMask

        first, keys, queries = self._keys - self._queries, self._keys, self._queries
        block = PAGE if queries > 1 else 1
        starts = torch.arange(0, queries, block)[:, None]
        at = torch.arange(self._width)[None, :] * PAGE
        last = torch.clamp(starts + block, max=queries) - 1 + first
        full = (at + PAGE - 1 <= starts + first) & (at + PAGE <= keys)
        part = (at <= last) & ~full
        logical = torch.full((self._batch, total), -1, dtype=torch.int32)
        logical.scatter_(1, table.long(), torch.arange(self._width, dtype=torch.int32).expand_as(table))

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            key = logical[b, kv // PAGE] * PAGE + kv % PAGE
            return (key <= q + first) & (key >= 0)

        lists = [_listed(chosen, table, total) for chosen in (part, full)]
        return BlockMask.from_kv_blocks(
            *lists[0],
            *lists[1],
            BLOCK_SIZE=(block if queries > 1 else PAGE, PAGE),
            mask_mod=visible,
            seq_lengths=(queries, total * PAGE),
            compute_q_blocks=False,
        )


def _forget() -> None:
    """Drop what was compiled for earlier cases: torch gives up after a few shapes of one function."""
    import torch

    torch.compiler.reset()


def _listed(chosen: Tensor, table: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """How many blocks of each row of queries are chosen, [B, 1, rows], and their pages in front of as many
    entries as the pool has pages, which torch asks for: [B, 1, rows, total]."""
    batch, (rows, width) = table.shape[0], chosen.shape
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    listed = table.new_zeros(batch, 1, rows, total)
    listed[..., :width] = table.gather(1, order.reshape(1, -1).expand(batch, -1)).view(batch, 1, rows, width)
    return chosen.sum(1).int().view(1, 1, rows).repeat(batch, 1, 1), listed
