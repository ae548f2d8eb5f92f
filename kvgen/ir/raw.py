"""RawSpec: which tokens of a request are left unquantised, and when blocks of tokens become codes.

One rule, and no state beside the length n of a request: token t is raw iff ``t < keep_first`` or
``t >= closed_end(n)``. It holds for K and V alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RawSpec:
    """The unquantised tokens of a request (KIVI's residual, protected first tokens, an open block)."""

    keep_first: int
    """Tokens at the start of a request that are never quantised."""
    keep_last: int
    """At least so many last tokens stay as they are."""
    block: int
    """Tokens that are quantised together: the least common multiple of K's and V's blocks."""
    page_size: int
    """Tokens of a page, a multiple of ``block``."""

    def closed_end(self, length: int) -> int:
        """Tokens at and after this one are raw while a request has ``length`` tokens."""
        return max(0, length - self.keep_last) // self.block * self.block

    def is_raw(self, token: int, length: int) -> bool:
        """Whether ``token`` is read from its raw row while the request has ``length`` tokens."""
        return token < self.keep_first or token >= self.closed_end(length)

    def pages(self, length: int) -> tuple[int, ...]:
        """Indices into the request's page table of the pages that hold raw tokens at ``length``."""
        size = self.page_size
        first = range(-(-min(self.keep_first, length) // size))
        last = range(self.closed_end(length) // size, -(-length // size))
        return tuple(sorted({*first, *last}))
