"""PagedSequence: the pages that hold one request's keys and values, shared until someone writes.

Layers share page ids, so one sequence stands for all layers of a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgen.runtime.arguments import INT64, need_integer
from kvgen.runtime.layers import Layer
from kvgen.runtime.pool import PagePool


class PageStore:
    """The pages of a model: who holds which (``pool``) and what they hold (``layers``)."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.pool = PagePool(self.layers[0].cache.num_pages)
        self.page_size: int = self.layers[0].library.spec.cache.page_size

    def pages(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens fill, the last perhaps in part."""
        return -(-tokens // self.page_size)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's bytes in every layer."""
        import torch

        device = self.layers[0].cache.device
        ids = torch.tensor([[source], [target]], dtype=torch.int32, device=device)
        for layer in self.layers:
            layer.library.copy(layer.cache, ids[0], ids[1])


class PagedSequence:
    """``length`` tokens in the pages of ``table``, in order; always exactly the pages they fill."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.length = 0
        self.num_pages = 0
        self._ids = np.empty(8, np.int32)

    @property
    def table(self) -> np.ndarray:
        """Page ids (num_pages,) int32: a view, good until the next change."""
        return self._ids[: self.num_pages]

    def pages_needed(self, tokens: int) -> int:
        """Free pages that ``reserve(tokens)`` takes, the copy of a shared last page included."""
        need_integer("tokens", tokens, 0, INT64, "give a number of tokens")
        return self.store.pages(self.length + tokens) - self.num_pages + self._must_copy()

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more tokens, which count from now on; the caller appends them.

        A partly filled last page that others hold too is copied first. Raises ``OutOfPages``, and whatever
        the copy raises; nothing has changed then.
        """
        need_integer("tokens", tokens, 1, INT64, "reserve at least one")
        pool, shared = self.store.pool, self._must_copy()
        fresh = pool.allocate(self.pages_needed(tokens))
        if shared:
            last, own = int(self._ids[self.num_pages - 1]), fresh[0]
            try:
                self.store.copy_page(last, own)
            except BaseException:
                pool.release(fresh)
                raise
            self._ids[self.num_pages - 1] = own
            pool.release([last])
            del fresh[0]
        if fresh:
            count = self.num_pages + len(fresh)
            if count > len(self._ids):
                self._ids = np.resize(self._ids, 2 * count)
            self._ids[self.num_pages : count] = fresh
            self.num_pages = count
        self.length += tokens

    def fork(self) -> PagedSequence:
        """A sequence of the same tokens that shares all pages; whoever writes first copies."""
        child = PagedSequence(self.store)
        self.store.pool.retain(self.table.tolist())
        child._ids = self._ids.copy()
        child.length, child.num_pages = self.length, self.num_pages
        return child

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on and give back the pages that only they filled."""
        hint = f"this sequence has {self.length} tokens to keep"
        length = need_integer("length", length, 0, self.length, hint)
        keep = self.store.pages(length)
        self.store.pool.release(self._ids[keep : self.num_pages].tolist())
        self.length, self.num_pages = length, keep

    def free(self) -> None:
        """Give back all pages. The sequence is empty then, and may be filled again."""
        self.truncate(0)

    def _must_copy(self) -> bool:
        """Whether the next token falls into a page that others hold too."""
        if self.length % self.store.page_size == 0:
            return False
        return self.store.pool.holders(int(self._ids[self.num_pages - 1])) > 1
