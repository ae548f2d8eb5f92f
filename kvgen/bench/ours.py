"""ours: kvgen's libraries as contenders, called as a user calls them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.bench.contender import Scene, Tensor, torch_type
from kvgen.bench.expect import MOVED, ROUGH, ROUNDING, offset_of
from kvgen.ir import PageRecord
from kvgen.tune.call_params import as_tensors, call_params

if TYPE_CHECKING:
    import torch

    from kvgen.library import Library
    from kvgen.runtime.cache import Cache

LARGEST_SCALE = {"e4m3": 448.0}
"""The largest scale of a block, where its type is too narrow for any."""

MOST_POOL = 4 << 30
"""Most bytes of one pool: a narrow window in long requests reads little of what it needs to hold."""


def make(scene: Scene, library: Library, name: str) -> Ours:
    """A library as a contender of a scene."""
    kinds: dict[str, type[Ours]] = {"append": Append, "copy": Copy, "gather": Gather}
    return kinds.get(scene.case.op, Attend)(scene, library, name)


class Ours:
    """A library and the cache that it works on."""

    def __init__(self, scene: Scene, library: Library, name: str) -> None:
        self.scene, self.library, self.name = scene, library, name
        self.spec = library.spec
        k, v = self.spec.cache.k.format, self.spec.cache.v.format
        self.format = k if k == v else f"{k}/{v}"
        self.dtype = torch_type(self.spec.attention.q_dtype)
        self.page_size = self.spec.cache.page_size
        self.scales, self.means = static_scales(scene, library), means_of(scene, library)
        self.sets = 1
        self.nbytes = 0
        self.tolerance = MOVED["f32"]

    def call(self, turn: int) -> None:
        """One call of the op."""
        raise NotImplementedError

    def results(self, turn: int) -> dict[str, Tensor]:
        """What it gave."""
        raise NotImplementedError

    @property
    def pool(self) -> Tensor:
        """The largest buffer of the cache, whose read limit counts."""
        return max(self.cache.pools.values(), key=lambda slab: int(slab.numel()))

    def _hold(self, pages_each: int, keys: int) -> torch.Tensor:
        """Make a cache whose sets take turns; returns page ids [sets, pages_each], a random permutation.

        ``keys``: rows that a call reads, for its bytes.
        """
        import torch

        each = token_bytes(self.library.record, self.page_size)
        self.nbytes = math.ceil(each * keys)
        whole = math.ceil(each * pages_each * self.page_size)
        self.sets = min(self.scene.sets(self.nbytes), max(1, MOST_POOL // whole))
        self._new_cache(pages_each * self.sets)
        order = torch.randperm(pages_each * self.sets, generator=self.scene.random).int()
        return order.reshape(self.sets, pages_each)

    @property
    def _values(self) -> torch.Tensor | None:
        """The scene's V; None where it is a part of K."""
        return None if self.spec.cache.alias else self.scene.v

    def _turning(self, positions: torch.Tensor) -> dict[str, Any]:
        """What an append that rotates K takes beside the rows."""
        rope = self.spec.attention.rope
        if rope is None or rope.stored != "post":
            return {}
        table = self.library.rope_table(int(positions.max()) + 1)
        return {"positions": positions, "params": {"rope_table": table}}

    def _new_cache(self, pages: int) -> None:
        """An empty cache whose memory was written: a pool of one shared page of zeros has no read limit."""
        self.cache: Cache = self.library.new_cache(
            pages, scales=self.scales or None, means=self.means or None
        )
        for slab in self.cache.pools.values():
            slab.zero_()

    def _fill(self, pages: torch.Tensor, lens: tuple[int, ...]) -> list[torch.Tensor]:
        """Append each set's requests; returns its page tables [requests, pages], one a set."""
        import torch

        size, width = self.page_size, max(-(-n // self.page_size) for n in lens)
        tables = []
        for ids in pages:
            table, slots, at = torch.zeros(len(lens), width, dtype=torch.int32), [], 0
            for request, length in enumerate(lens):
                need = -(-length // size)
                table[request, :need] = ids[at : at + need]
                at += need
                tok = torch.arange(length)
                slots.append(table[request, tok // size].long() * size + tok % size)
            tables.append(table)
            if self.spec.cache.raw is not None:
                self._append_requests(table, lens, [0, *itertools.accumulate(lens)])
                continue
            tok = torch.cat([torch.arange(n) for n in lens]).int()
            self.library.append(
                self.cache, self.scene.k, self._values, torch.cat(slots), **self._turning(tok)
            )
        return tables

    def _append_requests(self, table: torch.Tensor, lens: Sequence[int], starts: Sequence[int]) -> None:
        """Append the scene's rows where some tokens are left unquantised: requests say where they go."""
        import torch

        ints = {"kv_lens": list(lens), "q_starts": list(starts)}
        tables = {name: torch.tensor(values, dtype=torch.int32) for name, values in ints.items()}
        params = self._turning(torch.tensor(list(lens))).get("params")
        rows = (self.scene.k, self._values)
        self.library.append(self.cache, *rows, page_table=table, **tables, params=params)

    def _read_back(self, table: torch.Tensor, lens: list[int]) -> dict[str, Tensor]:
        import torch

        counts = torch.tensor(lens, dtype=torch.int32)
        k, v = self.library.gather(self.cache, table, counts, dtype=torch.float32)
        return {"k": k, "v": v}


class Attend(Ours):
    """Decode and prefill."""

    def __init__(self, scene: Scene, library: Library, name: str) -> None:
        super().__init__(scene, library, name)
        import torch

        case, att = scene.case, self.spec.attention
        rough = "int8" in (att.qk, att.pv)
        self.tolerance = ROUNDING[att.q_dtype] + (ROUGH if rough else 0.0)
        seen = case.keys_within(scene.shape.window)
        pages = self._hold(sum(-(-n // self.page_size) for n in case.kv_lens), seen)
        self._tables = self._fill(pages, case.kv_lens)
        self._lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        self._q = scene.q.to(self.dtype)
        starts = torch.tensor([0, *case.q_lens], dtype=torch.int32).cumsum(0).int()
        single = case.op == "decode" and max(case.q_lens) == 1
        self._starts = () if single else (starts,)
        rng = np.random.default_rng(0)
        self.params = call_params(self.spec, case.kv_lens, starts.numpy(), rng)
        """Values of the spec's parameters, for the oracle too."""
        self._params = as_tensors(self.params)
        self._out = torch.empty(case.queries, att.q_heads, att.v_head_dim, dtype=self.dtype)
        self._lse = torch.empty(case.queries, att.q_heads)
        self._op = getattr(library, case.op)

    def call(self, turn: int) -> None:
        """One attention over the set's pages."""
        table = self._tables[turn % self.sets]
        given: tuple[Any, ...] = (self._q, self.cache, table, self._lens, *self._starts)
        self._op(*given, out=self._out, lse=self._lse, num_threads=self.scene.threads, params=self._params)

    def results(self, turn: int) -> dict[str, Tensor]:
        """The outputs."""
        return {"out": self._out}


class Append(Ours):
    """One new token for each of many requests, whose pages lie anywhere."""

    def __init__(self, scene: Scene, library: Library, name: str) -> None:
        super().__init__(scene, library, name)
        import torch

        self._k = scene.k.to(self.dtype)
        self._v = None if self.spec.cache.alias else scene.v.to(self.dtype)
        count = scene.case.count
        # Turned by nothing, so that what is read back is what was given.
        self._turned = self._turning(torch.zeros(count, dtype=torch.int32))
        self.nbytes = math.ceil(token_bytes(library.record, self.page_size) * count)
        self._slots = append_slots(scene, self.nbytes, self.page_size)
        self.sets = len(self._slots)
        self._new_cache(-(-self.sets // self.page_size) * count)
        if self.spec.cache.raw is not None:
            # Each request has what came before its token in one page.
            self._starts = torch.arange(count + 1, dtype=torch.int32)
            self._tables = [
                {
                    "page_table": (slots // self.page_size).int().reshape(-1, 1),
                    "kv_lens": (slots % self.page_size + 1).int(),
                    "q_starts": self._starts,
                }
                for slots in self._slots
            ]

    def call(self, turn: int) -> None:
        """One append."""
        if self.spec.cache.raw is None:
            self.library.append(self.cache, self._k, self._v, self._slots[turn % self.sets], **self._turned)
            return
        tables, params = self._tables[turn % self.sets], self._turned.get("params")
        self.library.append(self.cache, self._k, self._v, **tables, params=params)

    def results(self, turn: int) -> dict[str, Tensor]:
        """The rows, read back with gather."""
        import torch

        slots = self._slots[turn % self.sets]
        table = (slots // self.page_size).int().reshape(-1, 1)
        lens = (slots % self.page_size + 1).int()
        k, v = self.library.gather(self.cache, table, lens, dtype=torch.float32)
        rows = lens.long().cumsum(0) - 1
        return {"k": k[rows], "v": v[rows]}


class Copy(Ours):
    """Whole pages to other places, as a fork does."""

    def __init__(self, scene: Scene, library: Library, name: str) -> None:
        super().__init__(scene, library, name)
        each = -(-scene.case.count // self.page_size)
        pages = self._hold(2 * each, 2 * each * self.page_size)
        self._sources = list(pages[:, :each].contiguous())
        self._places = list(pages[:, each:].contiguous())
        self._fill(pages[:, :each].contiguous(), (scene.case.count,))

    def call(self, turn: int) -> None:
        """One copy."""
        at = turn % self.sets
        self.library.copy(self.cache, self._sources[at], self._places[at])

    def results(self, turn: int) -> dict[str, Tensor]:
        """The rows in the new places."""
        table = self._places[turn % self.sets].reshape(1, -1)
        return self._read_back(table, [self.scene.case.count])


class Gather(Ours):
    """The rows of requests, contiguous and decoded."""

    def __init__(self, scene: Scene, library: Library, name: str) -> None:
        super().__init__(scene, library, name)
        import torch

        case, att = scene.case, self.spec.attention
        self.tolerance = MOVED[att.q_dtype]
        pages = self._hold(sum(-(-n // self.page_size) for n in case.kv_lens), case.keys)
        self._tables = self._fill(pages, case.kv_lens)
        self._lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        k, v = (
            torch.empty(case.keys, att.kv_heads, d, dtype=self.dtype) for d in (att.head_dim, att.v_head_dim)
        )
        self._rows = (k, v)
        self.nbytes += sum(rows.numel() * rows.element_size() for rows in self._rows)

    def call(self, turn: int) -> None:
        """One gather."""
        table = self._tables[turn % self.sets]
        if self.spec.cache.alias:
            self._rows = self.library.gather(self.cache, table, self._lens)
        else:
            self.library.gather(self.cache, table, self._lens, out=self._rows)

    def results(self, turn: int) -> dict[str, Tensor]:
        """The rows."""
        return {"k": self._rows[0], "v": self._rows[1]}


def token_bytes(record: PageRecord, page_size: int) -> float:
    """Bytes of one token's K, V and scales over all heads, without padding."""
    return sum(math.prod(plane.shape(1)) * plane.itemsize for plane in record.planes) / page_size


def static_scales(scene: Scene, library: Library) -> dict[str, Any]:
    """Scales that an append cannot find: the largest value of a head becomes the last code; where blocks have
    scales under an outer one, the last code under the largest scale."""
    found, spec = {}, library.spec
    quants = {part.plane: (side, part) for side in spec.cache.fields for part in spec.segments(side)}
    for name, _, per_head in spec.given_scales():
        plane, _, kind = name.rpartition("_")
        side, part = quants[plane]
        rows = getattr(scene, side)[..., part.start : part.start + part.size].float().abs()
        top = rows.amax((0, 2)) if per_head else rows.max().reshape(1)
        room = LARGEST_SCALE.get(part.quant.scale_dtype, 1.0) if kind == "outer" else 1.0
        found[plane] = top / (float(part.quant.fmt.qmax or 1) * room)
    return found


def means_of(scene: Scene, library: Library) -> dict[str, Any]:
    """The mean of K over all tokens, where the spec subtracts one."""
    return {"k": scene.k.float().mean(0)} if library.spec.cache.k.mean else {}


def append_slots(scene: Scene, nbytes: int, page_size: int) -> list[torch.Tensor]:
    """Slots [tokens] int64 of each call: a page for each token, and another place in it with each round of
    all pages, so that every slot is written before one is written again."""
    import torch

    count = scene.case.count
    rounds = max(2, -(-scene.sets(nbytes) // page_size))  # the first two calls find fresh pages
    pages = torch.randperm(rounds * count, generator=scene.random).reshape(rounds, count)
    offsets = torch.tensor([offset_of(token, page_size) for token in range(count)])
    return [ids * page_size + (offsets + shift) % page_size for shift in range(page_size) for ids in pages]
