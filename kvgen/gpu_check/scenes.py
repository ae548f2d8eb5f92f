"""scenes: workloads on the device, in memory that its L2 cache does not still hold.

Each call of a workload takes the next of several page tables over one pool, which together pass four times
the L2 cache before one comes back. Contents are random codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvgen.backends.triton.launch import workspace_bytes
from kvgen.capture import Capture
from kvgen.gpu_check.library import CubinLibrary
from kvgen.runtime.cache import Cache, torch_dtype
from kvgen.tune.call_params import angles, as_tensors, call_params

L2_TIMES = 4
"""The rotation spans so many times the L2 cache."""

MOST_TURNS = 64
"""Most page tables of one rotation."""


@dataclass
class Workload:
    """Calls of one op of one size, captured: values by ABI name, one for each turn."""

    op: str
    sizes: tuple[int, ...]
    cache: Cache
    turns: list[dict[str, Any]] = field(default_factory=list)
    nbytes: int = 0
    """Bytes of cache that one call must read or write."""
    tables: list[Any] = field(default_factory=list)
    """Page tables of the turns, where there are any."""
    q: Any = None

    @property
    def name(self) -> str:
        """``8x4096``."""
        return "x".join(map(str, self.sizes))


class Scenes:
    """Makes workloads for one library."""

    def __init__(self, library: CubinLibrary, l2_bytes: int) -> None:
        self.library, self._l2 = library, l2_bytes
        self.spec, self.record = library.spec, library.record
        self._seen = Capture(self.spec, self.record, library.device)

    def make(self, op: str, sizes: tuple[int, ...]) -> Workload:
        """A workload; torch's out-of-memory error where it does not fit."""
        makers: dict[str, Callable[..., Workload]] = {
            "append": self._append, "decode": self._decode, "prefill": self._prefill, "copy": self._copy,
            "gather": self._gather, "merge": self._merge,
        }  # fmt: skip
        return makers[op](sizes)

    def _cache(self, pages_each: int) -> tuple[Cache, int]:
        size = self.record.page_bytes()
        turns = min(MOST_TURNS, max(2, -(-L2_TIMES * self._l2 // (pages_each * size))))
        scales = {}
        for side in self.spec.cache.fields:
            quant = self.spec.cache.quant(side)
            if quant.static_scale:
                scales[side] = [0.02] * (self.spec.attention.kv_heads if "head" in quant.scale_dims else 1)
        cache = self.library.new_cache(pages_each * turns, scales=scales or None)
        for plane in self.record.planes:
            self._fill(plane.name, cache.planes[plane.name])
        return cache, turns

    @staticmethod
    def _fill(name: str, tensor: Any) -> None:
        """Codes of both signs and of moderate size: scores of a model's, not one key that takes all."""
        import torch

        if name.endswith("_scale"):
            tensor.fill_(0.02)
        elif tensor.dtype == torch.int8:
            tensor.random_(-64, 64)
        elif tensor.dtype == torch.uint8:
            tensor.random_(0, 256)
        elif tensor.itemsize == 1:  # e4m3: a sign and at most 15
            bits = tensor.view(torch.uint8)
            bits.random_(0, 0x58).add_(torch.randint_like(bits, 0, 2), alpha=0x80)
        else:
            tensor.normal_()

    def _tables(self, cache: Cache, turns: int, batch: int, width: int) -> list[Any]:
        import torch

        order = torch.randperm(cache.num_pages, device=cache.device).int()
        return list(order[: turns * batch * width].reshape(turns, batch, width))

    def _normal(self, *shape: int, dtype: str = "") -> Any:
        import torch

        kind = torch_dtype(dtype or self.spec.attention.q_dtype)
        return torch.randn(shape, device=self.library.device).to(kind)

    def _ints(self, values: Any, dtype: str = "int32") -> Any:
        import torch

        return torch.as_tensor(values, dtype=getattr(torch, dtype), device=self.library.device)

    def _take(self, made: Workload) -> None:
        """Keep the values of the call that was just captured, with a workspace of its own."""
        import torch

        values = self._seen.values
        plans: list[Any] = [c.plan for c in self.library.prepared.of(made.op)]
        need = max(workspace_bytes(plan, values) for plan in plans)
        values["workspace"] = torch.empty(max(need, 64), dtype=torch.uint8, device=self.library.device)
        made.turns.append(values)

    def _attention(self, op: str, sizes: tuple[int, ...], batch: int, q_len: int, context: int) -> Workload:
        width = -(-context // self.spec.cache.page_size)
        cache, turns = self._cache(batch * width)
        q = self._normal(batch * q_len, self.spec.attention.q_heads, self.spec.attention.head_dim)
        lens = self._ints([context] * batch)
        starts = None if op == "decode" else self._ints([i * q_len for i in range(batch + 1)])
        made = Workload(op, sizes, cache, q=q, nbytes=batch * width * self.record.page_bytes())
        made.tables = self._tables(cache, turns, batch, width)
        rows = np.arange(batch + 1) * q_len
        drawn = call_params(self.spec, [context] * batch, rows, np.random.default_rng(0))
        params = as_tensors(drawn, self.library.device)
        for table in made.tables:
            getattr(self._seen, op)(q, cache, table, lens, starts, params=params)
            self._take(made)
        return made

    def _decode(self, sizes: tuple[int, ...]) -> Workload:
        return self._attention("decode", sizes, sizes[0], 1, sizes[1])

    def _prefill(self, sizes: tuple[int, ...]) -> Workload:
        return self._attention("prefill", sizes, *sizes)

    def _append(self, sizes: tuple[int, ...]) -> Workload:
        (tokens,) = sizes
        att, size = self.spec.attention, self.spec.cache.page_size
        cache, turns = self._cache(-(-tokens // size))
        k, v = (self._normal(tokens, att.kv_heads, d) for d in (att.head_dim, att.v_head_dim))
        turning: dict[str, Any] = {}
        if att.rope and att.rope.stored == "post":
            params = as_tensors({"rope_table": angles(self.spec, tokens)}, self.library.device)
            turning = {"positions": self._ints(range(tokens)), "params": params}
        made = Workload("append", sizes, cache, nbytes=int(tokens * self.record.page_bytes() / size))
        for pages in self._tables(cache, turns, 1, -(-tokens // size)):
            slots = (pages[0].long()[:, None] * size + self._ints(range(size), "int64")).reshape(-1)
            values = None if self.spec.cache.alias else v
            self._seen.append(cache, k, values, slots[:tokens].contiguous(), **turning)
            self._take(made)
        return made

    def _copy(self, sizes: tuple[int, ...]) -> Workload:
        (pages,) = sizes
        cache, turns = self._cache(2 * pages)
        made = Workload("copy", sizes, cache, nbytes=2 * pages * self.record.page_bytes())
        for src, dst in self._tables(cache, turns, 2, pages):
            self._seen.copy(cache, src, dst)
            self._take(made)
        return made

    def _gather(self, sizes: tuple[int, ...]) -> Workload:
        batch, context = sizes
        att, width = self.spec.attention, -(-context // self.spec.cache.page_size)
        cache, turns = self._cache(batch * width)
        out = tuple(self._normal(batch * context, att.kv_heads, d) for d in (att.head_dim, att.v_head_dim))
        lens = self._ints([context] * batch)
        made = Workload("gather", sizes, cache, nbytes=batch * width * self.record.page_bytes())
        for table in self._tables(cache, turns, batch, width):
            self._seen.gather(cache, table, lens, out=None if self.spec.cache.alias else (out[0], out[1]))
            self._take(made)
        return made

    def _merge(self, sizes: tuple[int, ...]) -> Workload:
        states, rows = sizes
        att = self.spec.attention
        cache, _ = self._cache(1)
        made = Workload("merge", sizes, cache)
        outs = self._normal(states, rows, att.q_heads, att.v_head_dim)
        sinks = call_params(self.spec, [1], [0, 1], np.random.default_rng(0)).get("sink_logit")
        params = None if sinks is None else as_tensors({"sink_logit": sinks}, self.library.device)
        self._seen.merge(outs, self._normal(states, rows, att.q_heads, dtype="f32"), params=params)
        made.nbytes = outs.nbytes
        self._take(made)
        return made
