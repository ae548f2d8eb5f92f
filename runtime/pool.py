"""PagePool: which pages of a cache are free, and how many holders each of the others has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvgen.errors import ArgumentError, KvgenError
from kvgen.runtime.arguments import INT64, need_integer, need_integers

MOST_PAGES = 2**31 - 1


class OutOfPages(KvgenError, RuntimeError):
    """Fewer pages are free than an allocation asks for; nothing was taken."""


class PagePool:
    """Reference-counted page ids 0 .. total - 1.

    Free pages are reused in the order in which they were freed, so the same calls give the same ids. Every
    call does all or nothing: after an error the pool is as it was. Holds no memory.
    """

    def __init__(self, total: int) -> None:
        hint = f"give a positive number of pages, at most {MOST_PAGES} (ids are int32)"
        total = need_integer("total", total, 1, MOST_PAGES, hint)
        self.total = total
        self._free = deque(range(total))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        """Pages that have no holder."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that have a holder; ``free + used == total``."""
        return self.total - len(self._free)

    def holders(self, page: int) -> int:
        """How many hold ``page``; 0 for a free one."""
        return self._holders[need_integer("page", page, 0, self.total - 1, self._range())]

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, each with one holder. Raises ``OutOfPages``."""
        count = need_integer("count", count, 0, INT64, "give 0 or more pages")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, but {len(self._free)} of {self.total} are free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more holder for each of ``pages``, which must be held already."""
        for page in self._check(pages, "retain"):
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """One holder less for each of ``pages``; those without any are free, and returned."""
        freed = []
        for page in self._check(pages, "release"):
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        self._free.extend(freed)
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
