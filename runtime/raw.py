"""raw: the host side of open blocks: which pages hold unquantised tokens, and which raw row each has.

A page holds raw tokens while its request has a length for which ``RawSpec`` says so; then it needs a raw row.
Appends read and write raw rows but never hand them out: that is done here, before an append, and undone when
the tokens are quantised. A raw row belongs to a page, whichever requests share it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any

import numpy as np

from kvgen.errors import ArgumentError, brief
from kvgen.ir import RawSpec
from kvgen.runtime.arguments import need_integers
from kvgen.runtime.base import Tensor
from kvgen.runtime.cache import RAW_ROWS, Cache
from kvgen.runtime.pool import OutOfPages


class OutOfRawRows(OutOfPages):
    """Fewer raw rows are free than pages need one; nothing was taken."""


class RawRows:
    """The raw rows of caches that share page ids (the layers of a model), handed out page by page.

    Takes over ``cache.raw_rows`` of all of them: no page has a row at first. Specs may differ between layers;
    a page then has a row where any of them needs one. Without a spec that keeps tokens raw it does nothing.
    """

    def __init__(self, caches: Sequence[Cache]) -> None:
        if not isinstance(caches, Sequence) or not caches or not all(isinstance(c, Cache) for c in caches):
            raise ArgumentError(f"caches = {brief(caches)}: give a list of caches, one for each layer")
        if len(counts := {cache.num_pages for cache in caches}) > 1:
            raise ArgumentError(f"caches: they have {sorted(counts)} pages; page ids must be the same in all")
        raw = [cache for cache in caches if cache.spec.cache.raw is not None]
        self.specs: tuple[RawSpec, ...] = distinct(cache.spec for cache in raw)
        self.total: int = min(
            (cache.planes[c.name].shape[0] for cache in raw for c in cache.record.raw), default=0
        )
        """Raw rows that there are."""
        self.block = lcm(*(spec.block for spec in self.specs))
        """Tokens that become codes together, in all layers; 1 where each does so by itself."""
        self.waits = any(spec.block > 1 or spec.keep_last for spec in self.specs)
        """Whether tokens wait to become codes: how many depends on where a piece of a prompt ends."""
        self.tensors: tuple[Tensor, ...] = tuple(
            {id(cache.planes[RAW_ROWS]): cache.planes[RAW_ROWS] for cache in raw}.values()
        )
        self._free = deque(range(self.total))
        self._rows = np.full(caches[0].num_pages, -1, np.int32)
        for tensor in self.tensors:
            tensor.fill_(-1)

    @property
    def free(self) -> int:
        """Raw rows that no page has."""
        return len(self._free)

    def state(self) -> tuple[np.ndarray, tuple[int, ...]]:
        """What ``restore`` takes: the row of each page, and the free rows."""
        return self._rows.copy(), tuple(self._free)

    def restore(self, state: tuple[np.ndarray, tuple[int, ...]]) -> None:
        """Be again as when ``state`` was taken, on the device too; may be repeated."""
        rows, free = state
        self._rows, self._free = rows.copy(), deque(free)
        if self.tensors:
            import torch

            for tensor in self.tensors:
                tensor.copy_(torch.from_numpy(rows))

    def row(self, page: int) -> int:
        """The raw row of a page, -1 for none."""
        return int(self._rows[page])

    def pages(self, length: int) -> set[int]:
        """Indices into a request's page table of the pages that may keep a row at ``length`` tokens: those
        that need one, and one where an open block is about to begin."""
        return {index for spec in self.specs for index in spec.pages(length)}

    def needed(self, length: int) -> set[int]:
        """Indices of the pages that need a row at ``length`` tokens: those that hold raw ones."""
        found: set[int] = set()
        for spec in self.specs:
            open_end, size = spec.closed_end(length), spec.page_size
            found |= set(range(-(-min(spec.keep_first, length) // size)))
            if open_end < length:
                found |= set(range(open_end // size, -(-length // size)))
        return found

    def written(self, old: int, new: int) -> set[int]:
        """Indices of the pages that an append from ``old`` to ``new`` tokens writes to in some layer: those
        of the new tokens, and of older ones that become codes."""
        found: set[int] = set()
        for spec in self.specs:
            size = spec.page_size
            closing = max(spec.closed_end(old), spec.keep_first), min(spec.closed_end(new), old)
            for first, end in (closing, (old, new)):
                if first < end:
                    found |= set(range(first // size, -(-end // size)))
        return found

    def reserve(self, pages: Iterable[int]) -> list[int]:
        """Give each of ``pages`` that has no raw row one; returns those pages. Raises ``OutOfRawRows``."""
        fresh = [page for page in self._known(pages) if self._rows[page] < 0]
        if len(fresh) > len(self._free):
            reason = f"{len(fresh)} raw rows asked for, but {len(self._free)} of {self.total} are free"
            raise OutOfRawRows(reason)
        self._write(fresh, [self._free.popleft() for _ in fresh])
        return fresh

    def release(self, pages: Iterable[int]) -> None:
        """Take the raw rows of ``pages`` back; those without one are passed over."""
        held = [page for page in self._known(pages) if self._rows[page] >= 0]
        self._free.extend(self._rows[held].tolist())
        self._write(held, [-1] * len(held))

    def _known(self, pages: Iterable[int]) -> list[int]:
        """Page ids, each once; ``ArgumentError`` for one that no cache has, before any row moves."""
        hint = f"the cache has pages 0 to {len(self._rows) - 1}"
        found = list(dict.fromkeys(need_integers("pages", pages, hint)))
        if wrong := [page for page in found if not 0 <= page < len(self._rows)]:
            raise ArgumentError(f"pages: {brief(wrong[0])} among them, but {hint}")
        return found

    def _write(self, pages: list[int], rows: list[int]) -> None:
        if not pages:
            return
        import torch

        self._rows[pages] = rows
        for tensor in self.tensors:
            where = torch.tensor(pages, device=tensor.device)
            tensor.index_copy_(0, where, torch.tensor(rows, dtype=torch.int32, device=tensor.device))


def distinct(specs: Iterable[Any]) -> tuple[RawSpec, ...]:
    """The raw rules of some specs, each once."""
    return tuple(dict.fromkeys(spec.cache.raw for spec in specs if spec.cache.raw is not None))


def most_rows(specs: Sequence[RawSpec]) -> tuple[int, int]:
    """The most raw rows that a request needs at one length, and that it holds during an append."""
    first = max((-(-spec.keep_first // spec.page_size) for spec in specs), default=0)
    # An open part starts on a block and has up to keep_last + block - 1 tokens.
    last = max((-(-(spec.page_size + spec.keep_last - 1) // spec.page_size) for spec in specs), default=0)
    return first + last, first + 2 * last


def copy_rows(cache: Cache, src_pages: Tensor, dst_pages: Tensor) -> None:
    """Copy the raw rows of ``src_pages`` to those of ``dst_pages``, pair by pair, where both have one.

    Reads nothing back from a device: a pair without rows stands in for the first that has them.
    """
    import torch

    if cache.spec.cache.raw is None or not len(src_pages):
        return
    src, dst = (cache.planes[RAW_ROWS][pages.long()].long() for pages in (src_pages, dst_pages))
    live = (src >= 0) & (dst >= 0)
    first = live.int().argmax()
    src, dst = (torch.where(live, rows, rows[first].clamp_min(0)) for rows in (src, dst))
    # Without any pair a row is copied to another's place: keep what is there.
    src = torch.where(live.any(), src, dst)
    for plane in cache.record.raw:
        tensor = cache.planes[plane.name]
        tensor[dst] = tensor[src]


def reopened(spec: RawSpec, settled: int, length: int, new: int) -> list[tuple[int, int]]:
    """Runs of tokens that must become raw again when a request of ``length`` tokens is cut to ``new``.

    ``settled``: a shorter length whose raw tokens still lie in their rows.
    """
    first, end = max(spec.closed_end(new), spec.keep_first), min(new, spec.closed_end(length))
    runs = (first, min(end, spec.closed_end(settled))), (max(first, settled), end)
    return [run for run in runs if run[0] < run[1]]
