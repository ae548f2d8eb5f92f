"""Workloads on which candidates are timed: memory-sized caches, cold tables.

A cache line that is still in the last-level cache costs a tenth of one from memory, and a serving cache
never fits there. So decode's page tables are random, and each launch takes the next of several tables that
together pass the cache's size before one comes back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgen.backends.cpu import machine
from kvgen.capture import Capture
from kvgen.ir import PageRecord, Spec
from kvgen.runtime.cache import Cache, new_cache, torch_dtype
from kvgen.tune.bucket import Bucket
from kvgen.tune.call_params import angles, as_tensors, call_params
from kvgen.tune.given import as_given, given_means, given_scales

POOL_LIMIT = 1 << 30
"""Most bytes of a timed cache."""

MAX_ROTATION = 64
"""Most tables that launches take in turn."""


class Workload:
    """The arguments of launches of one bucket, on the CPU."""

    def __init__(self, spec: Spec, record: PageRecord, bucket: Bucket, *, seed: int = 0) -> None:
        import torch

        self.spec, self.record, self.bucket = spec, record, bucket
        self._ops = Capture(spec)
        self._random = torch.Generator().manual_seed(seed)
        self.nbytes = 0
        """Bytes of the caches."""
        self.rotation: list[dict[str, Any]] = getattr(self, f"_{bucket.op}")(*bucket.sizes)
        """Values by ABI name; launches take them in turn."""

    def values(self, turn: int) -> dict[str, Any]:
        """The values of launch number ``turn``."""
        return self.rotation[turn % len(self.rotation)]

    def _cache(self, pages_each: int) -> tuple[Cache, int]:
        """A filled cache for launches of ``pages_each`` pages, and how many of them run through it."""
        size = self.record.page_bytes()
        l3 = machine.snapshot().l3_bytes or 32 << 20
        turns = min(MAX_ROTATION, max(2, -(-2 * l3 // (pages_each * size)) + 1))
        # Each page has a raw row as well, where the spec keeps tokens raw.
        turns = max(1, min(turns, POOL_LIMIT // (pages_each * (size + self.record.raw_bytes()))))
        given = as_given(given_scales(self.spec), given_means(self.spec))
        cache = new_cache(self.spec, self.record, pages_each * turns, **given)
        self._fill(cache)
        self.nbytes += pages_each * turns * size
        return cache, turns

    def _fill(self, cache: Cache) -> None:
        """Random contents; a few pages are drawn and then doubled, because drawing is slower than copying."""
        import torch

        for plane in self.record.planes + self.record.raw:
            tensor = cache.planes[plane.name]
            axis = [placed.axis.dim for placed in plane.axes].index("page")
            pages = tensor.movedim(axis, 0)
            have = min(16, len(pages))
            if plane.name.endswith("_scale"):
                # A small power of two where it is stored as one; else a small number.
                pages.fill_(0x7A if plane.dtype == "e8m0" else 0.02)
                continue
            if plane.dtype in ("f32", "bf16", "f16"):
                pages[:have].normal_(generator=self._random)
            elif plane.dtype == "int8":
                pages[:have].random_(-127, 128, generator=self._random)
            else:  # every positive code of an eight-bit float but NaN and infinities, every other byte
                most = {"e4m3": 0x7F, "e5m2": 0x7C}.get(plane.dtype, 256)
                codes = torch.empty(pages[:have].shape, dtype=torch.uint8)
                pages[:have] = codes.random_(0, most, generator=self._random).view(tensor.dtype)
            while have < len(pages):
                step = min(have, len(pages) - have)
                pages[have : have + step] = pages[:step]
                have += step

    def _tables(self, cache: Cache, turns: int, batch: int, width: int) -> Any:
        import torch

        order = torch.randperm(cache.num_pages, generator=self._random).int()
        return order[: turns * batch * width].reshape(turns, batch, width)

    def _normal(self, *shape: int, dtype: str = "") -> Any:
        import torch

        kind = torch_dtype(dtype or self.spec.attention.q_dtype)
        return torch.randn(shape, generator=self._random).to(kind)

    def _outputs(self, rows: int) -> dict[str, Any]:
        import torch

        att = self.spec.attention
        kind = torch_dtype(att.q_dtype)
        return {
            "out": torch.empty(rows, att.q_heads, att.v_head_dim, dtype=kind),
            "lse": torch.empty(rows, att.q_heads),
        }

    def _attention(self, op: str, batch: int, q_len: int, context: int) -> list[dict[str, Any]]:
        import torch

        att, size = self.spec.attention, self.spec.cache.page_size
        width = -(-context // size)
        cache, turns = self._cache(batch * width)
        q = self._normal(batch * q_len, att.q_heads, att.head_dim)
        lens = torch.full((batch,), context, dtype=torch.int32)
        starts = None if op == "decode" else torch.arange(batch + 1, dtype=torch.int32) * q_len
        outs, found = self._outputs(batch * q_len), []
        rows = np.arange(batch + 1) * q_len
        params = as_tensors(call_params(self.spec, [context] * batch, rows, np.random.default_rng(0)))
        for table in self._tables(cache, turns, batch, width):
            getattr(self._ops, op)(q, cache, table, lens, starts, **outs, params=params)
            found.append(self._ops.values)
        return found

    def _decode(self, batch: int, context: int) -> list[dict[str, Any]]:
        return self._attention("decode", batch, 1, context)

    def _prefill(self, batch: int, q_len: int, context: int) -> list[dict[str, Any]]:
        return self._attention("prefill", batch, q_len, context)

    def _append(self, tokens: int) -> list[dict[str, Any]]:
        import torch

        att, size = self.spec.attention, self.spec.cache.page_size
        cache, turns = self._cache(-(-tokens // size))
        k = self._normal(tokens, att.kv_heads, att.head_dim)
        v = None if self.spec.cache.alias else self._normal(tokens, att.kv_heads, att.v_head_dim)
        turning: dict[str, Any] = {}
        if att.rope and att.rope.stored == "post":
            places = torch.arange(tokens, dtype=torch.int32)
            turning = {"positions": places, "params": as_tensors({"rope_table": angles(self.spec, tokens)})}
        found = []
        for pages in self._tables(cache, turns, 1, -(-tokens // size)):
            if self.spec.cache.raw is not None:
                ends = torch.tensor([0, tokens], dtype=torch.int32)
                tables = {"page_table": pages, "kv_lens": ends[1:], "q_starts": ends}
                self._ops.append(cache, k, v, **tables, params=turning.get("params"))
                found.append(self._ops.values)
                continue
            slots = (pages[0].long()[:, None] * size + torch.arange(size)).reshape(-1)[:tokens].contiguous()
            self._ops.append(cache, k, v, slots, **turning)
            found.append(self._ops.values)
        return found

    def _copy(self, pages: int) -> list[dict[str, Any]]:
        cache, turns = self._cache(2 * pages)
        found = []
        for src, dst in self._tables(cache, turns, 2, pages):
            self._ops.copy(cache, src, dst)
            found.append(self._ops.values)
        return found

    def _gather(self, batch: int, context: int) -> list[dict[str, Any]]:
        import torch

        att, size = self.spec.attention, self.spec.cache.page_size
        width = -(-context // size)
        cache, turns = self._cache(batch * width)
        kind = torch_dtype(att.q_dtype)
        rows = (batch * context, att.kv_heads)
        out = (torch.empty(*rows, att.head_dim, dtype=kind), torch.empty(*rows, att.v_head_dim, dtype=kind))
        lens, found = torch.full((batch,), context, dtype=torch.int32), []
        for table in self._tables(cache, turns, batch, width):
            self._ops.gather(cache, table, lens, out=None if self.spec.cache.alias else out)
            found.append(self._ops.values)
        return found

    def _merge(self, states: int, rows: int) -> list[dict[str, Any]]:
        att = self.spec.attention
        outs = self._normal(states, rows, att.q_heads, att.v_head_dim)
        lses = self._normal(states, rows, att.q_heads, dtype="f32")
        sinks = call_params(self.spec, [1], [0, 1], np.random.default_rng(0)).get("sink_logit")
        params = None if sinks is None else as_tensors({"sink_logit": sinks})
        self._ops.merge(outs, lses, **self._outputs(rows), params=params)
        return [self._ops.values]
