"""Draw: the call that sample values of parameters are drawn for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgen.ir import Param

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Draw:
    """The call that parameters are drawn for."""

    heads: int
    """Query heads."""
    kv_lens: Array
    """int64 [B]."""
    q_starts: Array
    """int64 [B + 1]."""
    kv: int
    """Logical positions that parameters must cover."""
    rng: np.random.Generator

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.kv_lens)

    @property
    def rows(self) -> int:
        """Query rows."""
        return int(self.q_starts[-1])

    def shape(self, param: Param) -> tuple[int, ...]:
        """Elements along each dimension of a parameter, of bits as if they were bytes."""
        sizes = {"batch": self.batch, "head": self.heads, "q": self.rows, "kv": self.kv}
        return tuple(sizes[dim] for dim in param.dims)
