"""torch's scaled_dot_product_attention: on contiguous K and V in three forms, and after a gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgen.bench.contender import Scene, Tensor, torch_type
from kvgen.bench.expect import ROUNDING
from kvgen.errors import UnsupportedError

MOST_MASK = 1 << 28
"""Most elements of a mask that is written out."""


class Sdpa:
    """What the forms share: requests of equal length are one call, others one call each group."""

    def __init__(self, scene: Scene, form: str, name: str) -> None:
        if not scene.shape.plain:
            raise UnsupportedError("a window, or attention that is not causal, is not in its plain form")
        self.scene, self.format, self.name = scene, form, name
        self.tolerance = ROUNDING[form]
        self.dtype = torch_type(form)
        shape, size = scene.shape, self.dtype.itemsize
        self.nbytes = scene.case.keys * shape.kv_heads * (shape.head_dim + shape.v_head_dim) * size
        self.sets = scene.sets(self.nbytes)
        self.kv = [self._store() for _ in range(self.sets)]
        self.q = self._queries()
        self.masks = [self._mask(queries, keys) for _, queries, keys in scene.case.groups]
        self.outs: list[Tensor] = []

    def call(self, turn: int) -> None:
        """Attend group by group."""
        pairs = zip(self.q, self.kv[turn % self.sets], self.masks, strict=True)
        self.outs = [self._attend(q, k, v, mask) for q, (k, v), mask in pairs]

    def results(self, turn: int) -> dict[str, Tensor]:
        """The outputs as rows of queries."""
        import torch

        return {"out": torch.cat([self._rows(out, group) for out, group in self._zip_groups()])}

    def _zip_groups(self) -> Any:
        return zip(self.outs, self.scene.case.groups, strict=True)

    def _attend(self, q: Tensor, k: Any, v: Any, mask: Tensor | None) -> Tensor:
        from torch.nn import functional

        whole = mask is None and q.shape[-2] > 1 and q.shape[-2] == k.shape[-2]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=whole, scale=self.scene.shape.scale, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        return {}

    def _store(self) -> list[tuple[Any, Any]]:
        """K and V [requests, kv_heads, keys, d] of each group."""
        return list(zip(self._stacked(self.scene.k), self._stacked(self.scene.v), strict=True))

    def _stacked(self, rows: Tensor) -> list[Tensor]:
        found, first = [], 0
        for batch, _, keys in self.scene.case.groups:
            part = rows[first : first + batch * keys].unflatten(0, (batch, keys)).transpose(1, 2)
            first += batch * keys
            made = self.scene.empty(*part.shape, dtype=self.dtype)
            found.append(made.copy_(part))
        return found

    def _queries(self) -> list[Tensor]:
        """q of each group, [requests, q_heads, queries, d]."""
        found, first = [], 0
        for batch, queries, _ in self.scene.case.groups:
            part = self.scene.q[first : first + batch * queries].to(self.dtype)
            first += batch * queries
            found.append(part.view(batch, queries, *part.shape[1:]).transpose(1, 2).contiguous())
        return found

    def _mask(self, queries: int, keys: int) -> Tensor | None:
        """bool [queries, keys] where a query does not see all; None where one sees all, or torch masks."""
        return None if queries in (1, keys) else self._written_mask(queries, keys)

    def _written_mask(self, queries: int, keys: int) -> Tensor:
        import torch

        if queries * keys > MOST_MASK:
            raise UnsupportedError(f"a mask of {queries} x {keys} would have to be written out")
        return torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + (keys - queries)

    def _rows(self, out: Tensor, group: tuple[int, int, int]) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)


class Folded(Sdpa):
    """The query heads of a KV head as rows: K and V are read once."""

    def _queries(self) -> list[Tensor]:
        heads = (self.scene.shape.kv_heads, self.scene.shape.group)
        return [q.unflatten(1, heads).flatten(2, 3) for q in super()._queries()]

    def _mask(self, queries: int, keys: int) -> Tensor | None:
        """[group * queries, keys]: torch's own causal mask would take the rows for queries."""
        if queries == 1:
            return None
        if self.scene.shape.group * queries * keys > MOST_MASK:
            raise UnsupportedError(f"a mask of {queries} x {keys} for every query head is too large")
        return self._written_mask(queries, keys).repeat(self.scene.shape.group, 1)

    def _rows(self, out: Tensor, group: tuple[int, int, int]) -> Tensor:
        heads = (self.scene.shape.group, group[1])
        return out.unflatten(2, heads).flatten(1, 2).transpose(1, 2).flatten(0, 1)


class Gqa(Sdpa):
    """torch's own way with grouped heads."""

    def _options(self) -> dict[str, Any]:
        return {"enable_gqa": True}


class Expanded(Sdpa):
    """K and V repeated for every query head before the clock starts."""

    def _store(self) -> list[tuple[Any, Any]]:
        group = self.scene.shape.group
        return [(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for k, v in super()._store()]


class Gathered(Gqa):
    """Pages of a pool, put together by torch's indexing at each call."""

    PAGE = 16

    def _store(self) -> list[tuple[Any, Any]]:
        """The pool's pages and the page table of each group, in the places of K and V."""
        import torch

        case, shape, page = self.scene.case, self.scene.shape, self.PAGE
        total = sum(batch * -(-keys // page) for batch, _, keys in case.groups)
        pools = [
            self.scene.empty(total, page, shape.kv_heads, width, dtype=self.dtype)
            for width in (shape.head_dim, shape.v_head_dim)
        ]
        order, found, first, at = torch.randperm(total, generator=self.scene.random), [], 0, 0
        for batch, _, keys in case.groups:
            width = -(-keys // page)
            table = order[at : at + batch * width].reshape(batch, width)
            at += batch * width
            tok = torch.arange(keys)
            slots = (table[:, tok // page] * page + tok % page).reshape(-1)
            for pool, rows in zip(pools, (self.scene.k, self.scene.v), strict=True):
                pool.flatten(0, 1)[slots] = rows[first : first + batch * keys].to(self.dtype)
            first += batch * keys
            found.append((_Paged(pools[0], table, keys), _Paged(pools[1], table, keys)))
        return found

    def _attend(self, q: Tensor, k: Any, v: Any, mask: Tensor | None) -> Tensor:
        return super()._attend(q, k.rows(), v.rows(), mask)


@dataclass(frozen=True)
class _Paged:
    """K or V of a group of requests, in the pages of a pool."""

    pool: Tensor
    """[pages, page, kv_heads, d]"""
    table: Tensor
    """[requests, pages]"""
    keys: int

    def rows(self) -> Tensor:
        """[requests, kv_heads, keys, d], put together by indexing."""
        return self.pool[self.table].flatten(1, 2)[:, : self.keys].transpose(1, 2)
