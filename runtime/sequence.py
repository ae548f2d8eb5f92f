"""PagedSequence: the pages that hold one request's keys and values, shared until someone writes.

Layers share page ids, so one sequence stands for all layers of a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgen.runtime.arguments import INT64, need_integer
from kvgen.runtime.layers import Layer
from kvgen.runtime.pool import PagePool
from kvgen.runtime.raw import RawRows, reopened
from kvgen.runtime.reopen import reopen


class PageStore:
    """The pages of a model: who holds which (``pool``), what they hold (``layers``), and which of them have
    tokens that are left unquantised (``rows``)."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.pool = PagePool(self.layers[0].cache.num_pages)
        self.page_size: int = self.layers[0].library.spec.cache.page_size
        self.rows = RawRows([layer.cache for layer in self.layers])

    def pages(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens fill, the last perhaps in part."""
        return -(-tokens // self.page_size)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the bytes of pages in every layer, raw rows included."""
        import torch

        device = self.layers[0].cache.device
        ids = torch.tensor([list(sources), list(targets)], dtype=torch.int32, device=device)
        for layer in self.layers:
            layer.library.copy(layer.cache, ids[0], ids[1])

    def release(self, pages: Sequence[int]) -> None:
        """Give back one hold of each of ``pages``; a page without a holder gives back its raw row."""
        self.rows.release(self.pool.release(pages))


class PagedSequence:
    """``length`` tokens in the pages of ``table``, in order; always exactly the pages they fill.

    Pages are shared with forks until one of them writes: an append copies first what it writes to, which are
    the pages of new tokens and, where tokens wait to become codes, those that it turns into codes.
    """

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.length = 0
        self._ids = np.empty(0, np.int32)
        """Page ids; replaced by every change and never written, so that ``state`` needs no copy."""
        self._settled = 0
        """The length whose raw tokens still have their rows: the one before the latest ``reserve``."""

    @property
    def table(self) -> np.ndarray:
        """Page ids (num_pages,) int32, as they are now: not to be written."""
        return self._ids

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self._ids)

    def state(self) -> tuple[np.ndarray, int, int]:
        """What ``restore`` takes."""
        return self._ids, self.length, self._settled

    def restore(self, state: tuple[np.ndarray, int, int]) -> None:
        """Be again as when ``state`` was taken; may be repeated. Pages are the pool's to restore."""
        self._ids, self.length, self._settled = state

    def pages_needed(self, tokens: int) -> int:
        """Free pages that ``reserve(tokens)`` takes, copies of shared pages included."""
        need_integer("tokens", tokens, 0, INT64, "give a number of tokens")
        fresh = self.store.pages(self.length + tokens) - self.num_pages
        return fresh + len(self._shared(self._written(tokens)))

    def rows_needed(self, tokens: int) -> int:
        """Free raw rows that ``reserve(tokens)`` takes; 0 where the model keeps no tokens raw."""
        need_integer("tokens", tokens, 0, INT64, "give a number of tokens")
        return len(self._without_row(self._shared(self._written(tokens)), self.length + tokens))

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more tokens, which count from now on; the caller appends them.

        Pages that the append writes to and others hold too are copied first. Raises ``OutOfPages`` (raw rows
        included), and whatever the copy raises; nothing has changed then.
        """
        need_integer("tokens", tokens, 1, INT64, "reserve at least one")
        self.settle()
        length = self.length + tokens
        shared = self._shared(self._written(tokens))
        count = self.store.pages(length) - self.num_pages + len(shared)
        if not count and not self.store.rows.specs:  # most tokens of most requests
            self.length = length
            return
        fresh = self.store.pool.allocate(count)
        ids = np.concatenate([self.table, np.array(fresh[len(shared) :], np.int32)])
        ids[shared] = fresh[: len(shared)]
        rows: list[int] = []
        try:
            rows = self.store.rows.reserve(ids[self._without_row(shared, length)].tolist())
            self._copy(shared, ids)
        except BaseException:
            self.store.rows.release(rows)
            self.store.pool.release(fresh)
            raise
        self.store.pool.release(self._ids[shared].tolist())
        self._ids, self.length = ids, length

    def settle(self) -> None:
        """Say that the reserved tokens are appended, in every layer: raw rows of tokens that have become
        codes are free then. Every further call but ``truncate`` says so too."""
        if self._settled == self.length or not self.store.rows.specs:
            return
        rows = self.store.rows
        done = rows.pages(self._settled) - rows.pages(self.length)
        rows.release(self._ids[sorted(done)].tolist())
        self._settled = self.length

    def fork(self) -> PagedSequence:
        """A sequence of the same tokens that shares all pages; the first to write copies."""
        self.settle()
        child = PagedSequence(self.store)
        self.store.pool.retain(self.table.tolist())
        child._ids = self._ids
        child.length = child._settled = self.length
        return child

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on and give back the pages that only they filled.

        Tokens that are codes and are raw at ``length`` get their raw rows back, with the values that the
        codes stand for; unless they are as they were before the latest ``reserve``, whose rows are still
        there. Raises ``OutOfPages`` where such tokens lie in pages that others hold, and no page or raw row
        is free for a copy; nothing has changed then.
        """
        hint = f"this sequence has {self.length} tokens to keep"
        length = need_integer("length", length, 0, self.length, hint)
        keep = self.store.pages(length)
        ids = self.table.copy()
        if self.store.rows.specs:
            self._reopen(length, ids)
        self.store.release(ids[keep:].tolist())
        done = self.store.rows.pages(self._settled) - self.store.rows.pages(length)
        self.store.rows.release(ids[[index for index in sorted(done) if index < keep]].tolist())
        self._ids = ids[:keep]
        self.length = self._settled = length

    def free(self) -> None:
        """Give back all pages. The sequence is empty then, and may be filled again."""
        self.truncate(0)

    def _reopen(self, length: int, ids: np.ndarray) -> None:
        """Make the tokens that are raw at ``length`` raw again, in pages that are put into ``ids``."""
        store, size = self.store, self.store.page_size
        runs = {spec: reopened(spec, self._settled, self.length, length) for spec in store.rows.specs}
        found = {page for run in runs.values() for a, b in run for page in range(a // size, -(-b // size))}
        if not found:
            return
        shared = self._shared(found)
        fresh = store.pool.allocate(len(shared))
        ids[shared] = fresh
        rows: list[int] = []
        try:
            rows = store.rows.reserve(ids[self._without_row(shared, length)].tolist())
            self._copy(shared, ids)
            for layer in store.layers:
                raw = layer.library.spec.cache.raw
                if raw is not None:
                    reopen(layer, self.table, self.length, runs[raw], ids)
        except BaseException:
            store.rows.release(rows)
            store.pool.release(fresh)
            raise
        store.pool.release(self._ids[shared].tolist())

    def _written(self, tokens: int) -> set[int]:
        """Indices of the pages that an append of ``tokens`` tokens writes to."""
        found = self.store.rows.written(self.length, self.length + tokens)
        if tokens and self.length % self.store.page_size:
            found.add(self.num_pages - 1)
        return found

    def _shared(self, indices: set[int]) -> list[int]:
        """Those of ``indices`` whose pages exist and have further holders."""
        holders = self.store.pool.holders
        return [i for i in sorted(indices) if i < self.num_pages and holders(int(self._ids[i])) > 1]

    def _without_row(self, shared: list[int], length: int) -> list[int]:
        """Indices of the pages that need a raw row of their own at ``length`` when ``shared`` are copied."""
        rows = self.store.rows
        if not rows.specs:
            return []
        wanted = rows.needed(length)
        has = {i for i in wanted.union(shared) if i < self.num_pages and rows.row(int(self._ids[i])) >= 0}
        return sorted((wanted - has) | (set(shared) & (wanted | has)))

    def _copy(self, shared: list[int], ids: np.ndarray) -> None:
        if shared:
            self.store.copy_pages(self._ids[shared].tolist(), ids[shared].tolist())
