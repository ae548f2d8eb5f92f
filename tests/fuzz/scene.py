"""Scene: a library, a cache between guard bytes, and right arguments for every op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch

from kvgen.runtime.cache import torch_dtype
from kvgen.variants.samples import sample_params
from tests.support.world import plane_views, static_scales

GUARD = 128
"""Bytes of pattern on each side of a buffer."""
PAGES = 7


class Memory:
    """Buffers between guard bytes, and what they held when they were last looked at."""

    def __init__(self) -> None:
        self._bases: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` between guard bytes."""
        size = tensor.numel() * tensor.itemsize
        base = torch.full((size + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        view = base[GUARD : GUARD + size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        self._bases.append((base, base.clone()))
        return view

    def keep(self) -> None:
        """What is there now is right."""
        for base, copy in self._bases:
            copy.copy_(base)

    def changed(self, allowed: list[Any]) -> str:
        """Where a byte changed that belongs to no tensor of ``allowed``; empty for nowhere."""
        for at, (base, copy) in enumerate(self._bases):
            if torch.equal(base, copy):
                continue
            free = torch.zeros_like(base, dtype=torch.bool)
            for tensor in allowed:
                if isinstance(tensor, torch.Tensor):
                    _mark(free, base, tensor)
            wrong = (base != copy) & ~free
            if wrong.any():
                first = int(wrong.nonzero()[0])
                return f"byte {first - GUARD} of buffer {at} ({base.numel() - 2 * GUARD} bytes) changed"
        return ""


def _mark(free: torch.Tensor, base: torch.Tensor, tensor: torch.Tensor) -> None:
    """Set ``free`` at the bytes of ``tensor``, if it lies in ``base``."""
    try:
        first = tensor.data_ptr() - base.data_ptr()
        if not 0 <= first < base.numel() or not tensor.numel():
            return
        size = tensor.itemsize
        # The stride of an axis with one place may be anything, 2**62 too.
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        shape, steps = (*tensor.shape, size), (*(step * size if n > 1 else 0 for n, step in pairs), 1)
        free.as_strided(shape, steps, first).fill_(True)
    except RuntimeError:  # a tensor without an address, or one that reaches beyond the buffer
        return


@dataclass
class Call:
    """A call of the API: what to run, and what holds of it when it is not refused."""

    name: str
    run: Callable[..., Any]
    args: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Call, Any], str] = lambda call, result: ""
    """Says what is wrong with a result."""
    writes: Callable[[Call], list[Any]] = lambda call: []
    """Tensors whose bytes may change."""
    around: Callable[[Callable[[], Any]], Any] = lambda run: run()
    """A transform in which the call is made."""
    signatures: bool = False
    """Whether torch's dispatcher stands in front and words errors of its own."""

    def __call__(self) -> Any:
        return self.around(lambda: self.run(*self.args.values(), **self.options))


class Scene:
    """One spec's library with a cache, filled, whose slab lies between guard bytes."""

    def __init__(self, lib: Any, rng: Random) -> None:
        self.lib, self.rng, self.spec, self.memory = lib, rng, lib.spec, Memory()
        self.att, self.page = lib.spec.attention, lib.spec.cache.page_size
        torch.manual_seed(rng.randrange(2**31))
        self.cache = self.adopted()
        self.slabs = [base for base, _ in self.memory._bases]

    def adopted(self) -> Any:
        """A cache of random bytes, some of them page by page NaN."""
        return self.lib.adopt(scales=static_scales(self.spec), **self.planes())

    def planes(self) -> dict[str, torch.Tensor]:
        """Planes as ``adopt`` takes them, in memory of their own."""
        slabs = {
            pool: self.memory.place(torch.randint(0, 256, (size.at(PAGES),), dtype=torch.uint8)).numpy()
            for pool, size in self.lib.record.pools
        }
        return plane_views(self.lib.record, PAGES, slabs)

    def ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.memory.place(torch.tensor(values, dtype=dtype))

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.memory.place(torch.randn(shape).to(dtype))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Page table, lengths, and the lengths as a list."""
        rng, count = self.rng, self.rng.choice([0, 1, 1, 2, 3])
        width = rng.choice([1, 2, 3])
        lens = [rng.choice([0, 1, self.page, rng.randrange(width * self.page + 1)]) for _ in range(count)]
        table = [[rng.randrange(PAGES) for _ in range(width)] for _ in lens]
        ids = self.ints(table) if count else self.memory.place(torch.zeros(0, width, dtype=torch.int32))
        return ids, self.ints(lens), lens

    def params(self, lens: list[int], starts: list[int]) -> dict[str, torch.Tensor]:
        """Right parameters of a decode or a prefill, none where the spec reads none; one more at times than
        the kernel wants positions of."""
        random = np.random.default_rng(self.rng.randrange(2**31))
        found = sample_params(self.spec, kv_lens=lens, q_starts=starts, rng=random)
        given = {name: self.memory.place(torch.from_numpy(values)) for name, values in found.items()}
        rope = self.att.rope
        if rope is not None and rope.stored == "pre":
            given["rope_table"] = self.angles(max(lens, default=0) + self.rng.choice([1, 3]))
        return given

    def angles(self, positions: int) -> torch.Tensor:
        """The spec's table of angles for so many positions."""
        return self.memory.place(self.lib.rope_table(positions))

    def outputs(self, rows: int) -> dict[str, torch.Tensor]:
        """None, one or both of ``out`` and ``lse``."""
        att, found = self.att, {}
        if self.rng.random() < 0.5:
            found["out"] = self.floats(rows, att.q_heads, att.v_head_dim, dtype=torch_dtype(att.q_dtype))
        if self.rng.random() < 0.5:
            found["lse"] = self.floats(rows, att.q_heads)
        return found
