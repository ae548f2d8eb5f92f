"""Prefill calls with parameters, on poisoned memory, beside what the oracle makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvgen import reference
from kvgen.variants import positions
from kvgen.variants.samples import sample_params
from tests.support.oracle import known, to_numpy
from tests.support.world import World

Pair = tuple[torch.Tensor, torch.Tensor]


class PrefillCall:
    """A filled cache, queries and parameters, drawn once; run by a library and by the oracle.

    ``params`` replace drawn ones. ``edit`` may change the keys and values before they are stored.
    """

    def __init__(
        self,
        lib: Any,
        lens: Sequence[int],
        q_lens: Sequence[int],
        *,
        seed: int = 0,
        params: Mapping[str, np.ndarray] | None = None,
        edit: Any = None,
    ) -> None:
        self.spec, self.lens, self.starts = lib.spec, list(lens), [0, *accumulate(q_lens)]
        att = self.spec.attention
        self.world = World(lib, sum(-(-n // self.spec.cache.page_size) for n in lens) + 3, seed=seed)
        self.table = self.world.table(lens)
        slots = self.world.slots(self.table, lens)
        k, v = (
            self.world.normal(len(slots), att.kv_heads, width) for width in (att.head_dim, att.v_head_dim)
        )
        if edit is not None:
            edit(k, v)
        values = None if self.spec.cache.alias else v
        lib.append(self.world.cache, k, values, self.world.ints(slots, torch.int64))
        self.q = self.world.query(self.starts[-1])
        drawn = sample_params(self.spec, kv_lens=lens, q_starts=self.starts, rng=self.world.rng)
        if att.rope is not None and att.rope.stored == "pre":
            frequencies = positions()[att.rope.kind].frequencies(att.rope)
            drawn["rope_table"] = reference.rope_table(*frequencies, max(lens))
        self.params = {**drawn, **(params or {})}

    def run(
        self, *, first: int = 0, table: torch.Tensor | None = None, threads: int = 1, finalize: bool = True
    ) -> Pair:
        """What the library gives. ``first``: of a single request, only the queries from that one on."""
        by_row = {p.name for p in self.spec.attention.params if "q" in p.dims}
        parts = {name: value[first:] if name in by_row else value for name, value in self.params.items()}
        given = {
            name: self.world.tensor(torch.from_numpy(np.ascontiguousarray(part)))
            for name, part in parts.items()
        }
        q = self.q[first:]
        starts = self.starts if not first else [0, len(q)]
        args = (q, self.world.cache, self.table if table is None else table, self.world.ints(self.lens))
        outputs = self.world.outputs(len(q))
        call = {"params": given or None, "num_threads": threads, "finalize": finalize}
        return self.world.lib.prefill(*args, self.world.ints(starts), **outputs, **call)

    def want(self, *, finalize: bool = True) -> Pair:
        """What the oracle gives."""
        world = self.world
        found = reference.prefill(
            self.spec, world.record, world.bytes, world.num_pages, self.table.numpy(), self.lens,
            to_numpy(self.q), self.starts, params=self.params, finalize=finalize,
            **known(world.cache),
        )  # fmt: skip
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
