"""PagePool: which pages of a cache are free, and how many holders each of the others has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgen.errors import ArgumentError, KvgenError
from kvgen.runtime.arguments import INT64, need_integer, need_integers

MOST_PAGES = 2**31 - 1


class OutOfPages(KvgenError, RuntimeError):
    """Fewer pages are free than an allocation asks for; nothing was taken."""


@dataclass(frozen=True)
class PoolState:
    """Who holds what at one moment; its arrays are never written."""

    holders: np.ndarray
    ring: np.ndarray
    first: int
    count: int


class PagePool:
    """Reference-counted page ids 0 .. total - 1.

    Free pages are reused in the order in which they were freed, so the same calls give the same ids. Every
    call does all or nothing: after an error the pool is as it was. Holds no memory.
    """

    def __init__(self, total: int) -> None:
        hint = f"give a positive number of pages, at most {MOST_PAGES} (ids are int32)"
        total = need_integer("total", total, 1, MOST_PAGES, hint)
        self.total = total
        self._holders = np.zeros(total, np.int32)
        self._ring = np.arange(total, dtype=np.int32)
        """Free pages, in the order in which they are handed out: ``_count`` of them from ``_first`` on,
        around."""
        self._first, self._count = 0, total

    @property
    def free(self) -> int:
        """Pages that have no holder."""
        return self._count

    @property
    def used(self) -> int:
        """Pages that have a holder; ``free + used == total``."""
        return self.total - self._count

    def state(self) -> PoolState:
        """What ``restore`` takes: one copy of who holds what."""
        return PoolState(self._holders.copy(), self._ring.copy(), self._first, self._count)

    def restore(self, state: PoolState) -> None:
        """Be again as when ``state`` was taken; may be repeated."""
        self._holders, self._ring = state.holders.copy(), state.ring.copy()
        self._first, self._count = state.first, state.count

    def holders(self, page: int) -> int:
        """How many hold ``page``; 0 for a free one."""
        return int(self._holders[need_integer("page", page, 0, self.total - 1, self._range())])

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, each with one holder. Raises ``OutOfPages``."""
        count = need_integer("count", count, 0, INT64, "give 0 or more pages")
        if count > self._count:
            raise OutOfPages(f"{count} pages asked for, but {self._count} of {self.total} are free")
        pages = self._ring[(self._first + np.arange(count)) % self.total]
        self._first, self._count = (self._first + count) % self.total, self._count - count
        self._holders[pages] = 1
        found: list[int] = pages.tolist()
        return found

    def retain(self, pages: Sequence[int]) -> None:
        """One more holder for each of ``pages``, which must be held already."""
        self._holders[self._check(pages, "retain")] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """One holder less for each of ``pages``; those without any are free, and returned."""
        given = self._check(pages, "release")
        if not given:
            return []
        self._holders[given] -= 1
        freed = [page for page in given if not self._holders[page]]
        self._ring[(self._first + self._count + np.arange(len(freed))) % self.total] = freed
        self._count += len(freed)
        return freed

    def _check(self, pages: Sequence[int], what: str) -> list[int]:
        """``pages`` as held page ids, none of them twice."""
        found = need_integers("pages", pages, self._range())
        # No holder has a page twice, so a page named twice is a mistake even where two others hold it.
        if len(set(found)) != len(found):
            twice = next(page for at, page in enumerate(found) if page in found[:at])
            raise ArgumentError(f"page {twice}: named twice in one {what}; name each page once")
        for page in found:
            if not 0 <= page < self.total:
                raise ArgumentError(f"page {page}: {self._range()}")
            if not self._holders[page]:
                raise ArgumentError(f"page {page}: cannot {what} a free page (freed twice?)")
        return found

    def _range(self) -> str:
        return f"the pool has pages 0 to {self.total - 1}"
