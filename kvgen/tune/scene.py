"""A poisoned, hard little cache on which kernels are checked, and outputs that show a stray write.

What published faults taught (tests/conformance): pages permuted and shared between requests; NaN in every
slot that no request owns, in the pages a sliding window has left behind, in outputs and in the padding of
rows; ids in the tails of page tables that would fault if they were read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgen import reference
from kvgen.library import Library
from kvgen.reference.codec import NUMPY, Array
from kvgen.tune.call_params import angles, call_params
from kvgen.tune.given import as_given, given_means, given_scales
from kvgen.tune.raw_rows import raw_pool, raw_rows_of, shareable

CODE_POISON = {"int8": 0x81, "int4x2": 0x99}
"""Byte of unowned integer codes, by storage type: -127, or twice -7, the largest magnitude (scales that the
cache holds are NaN there). Every other type's is 0xFF: NaN, or the last code."""

HUGE_IDS = (2**31 - 1, -(2**31), 1 << 24)
"""What stands in a page table after a request's last page."""


class Scene:
    """Requests of given lengths over permuted, partly shared pages of one cache.

    Keys where masks, tiles and splits begin or end are "loud": each carries about half of the weight of the
    query next to it, so that a bound that is off by one changes the answer by far more than rounding does.
    """

    def __init__(
        self,
        library: Library,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        edges: Sequence[int] = (),
        negative: int | None = None,
        seed: int = 0,
    ) -> None:
        """``edges``: positions where tiles or splits end; ``negative``: a request whose logits are all far
        below any finite stand-in for -inf."""
        self.library, self.spec, self.record = library, library.spec, library.record
        self.rng = np.random.default_rng(seed)
        self.q_lens, self.kv_lens = list(q_lens), list(kv_lens)
        self.starts = np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)
        self._assign_pages()
        self.scales, self.means = given_scales(self.spec), given_means(self.spec)
        raw = self.spec.cache.raw
        self.raw_rows, self.num_raw = raw_rows_of(raw, self.pages, self.kv_lens, self.num_pages, seed)
        self.pools = poisoned_pools(library, self.num_pages, self.num_raw)
        att = self.spec.attention
        q = self.rng.standard_normal((int(self.starts[-1]), att.q_heads, att.head_dim)).astype(np.float32)
        if negative is not None:
            q[self.starts[negative] : self.starts[negative + 1]] = 64.0
        self.q = reference.store_float(q, att.q_dtype)
        self.params = call_params(self.spec, self.kv_lens, self.starts, self.rng)
        """Values of the spec's parameters by name."""
        self.terms = reference.Terms(att, self.params)
        self._fill(reference.widen(self.q), edges, negative)
        self._forget_unseen()

    def _assign_pages(self) -> None:
        """Give every second request the pages of the longest one as its prefix, its last page excepted."""
        size, raw = self.spec.cache.page_size, self.spec.cache.raw
        counts = [-(-n // size) for n in self.kv_lens]
        longest = int(np.argmax(self.kv_lens)) if self.kv_lens else 0
        shared = [
            shareable(raw, self.kv_lens[b], max(0, count - 1), size) if b % 2 == 0 and b != longest else 0
            for b, count in enumerate(counts)
        ]
        private = sum(counts) - sum(shared)
        self.num_pages = private + 4
        ids = self.rng.permutation(self.num_pages)[:private].tolist()
        own = [[ids.pop() for _ in range(count - head)] for count, head in zip(counts, shared, strict=True)]
        self.pages = [own[longest][:head] + rest for head, rest in zip(shared, own, strict=True)]

    def _fill(self, q: Array, edges: Sequence[int], negative: int | None) -> None:
        att, size = self.spec.attention, self.spec.cache.page_size
        slot_lists = [
            np.array(pages, np.int64)[np.arange(n) // size] * size + np.arange(n) % size
            if n
            else np.zeros(0, np.int64)
            for pages, n in zip(self.pages, self.kv_lens, strict=True)
        ]
        slots = np.unique(np.concatenate([*slot_lists, np.zeros(0, np.int64)]))
        rows = {
            side: self.rng.standard_normal((len(slots), att.kv_heads, width), dtype=np.float32)
            # Magnitudes differ from row to row, so that a scale taken from a neighbour shows.
            * np.exp2(self.rng.integers(-2, 2, (len(slots), att.kv_heads, 1))).astype(np.float32)
            for side, width in (("k", att.head_dim), ("v", att.v_head_dim))
        }
        place = np.zeros(len(slots), np.int32)
        for b, own in enumerate(slot_lists):
            at = np.searchsorted(slots, own)
            place[at] = np.arange(len(own))  # pages are shared at their place only
            if b == negative:
                rows["k"][at] = -64.0
                continue
            for t, i in self._loud(b, edges):
                row = q[int(self.starts[b]) + i].reshape(att.kv_heads, att.group, -1)[:, t % att.group]
                weight = math.log(max(2, len(own))) + 0.5
                norm = (row**2).sum(axis=-1, keepdims=True) * att.scale
                rows["k"][at[t]] = row * (weight / np.maximum(norm, 1e-3))
        given: dict[str, Any] = self.known
        if att.rope and att.rope.stored == "post":
            longest = int(place.max(initial=0)) + 1
            given = given | {"params": {"rope_table": angles(self.spec, longest)}}
        where = (self.spec, self.record, self.pools, self.num_pages)
        v = None if self.spec.cache.alias else rows["v"]
        if self.raw_rows is None:
            if "params" in given:
                given = given | {"positions_T": place}
            reference.append(*where, rows["k"], v, slots, **given)
            return
        for pages, own in zip(self.pages, slot_lists, strict=True):
            # One by one, from the first token on: what they share is written again, and comes out the same.
            at, n = np.searchsorted(slots, own), len(own)
            new = (rows["k"][at], None if v is None else v[at])
            reference.append_requests(*where, *new, [pages], [n], [0, n], **given)

    @property
    def known(self) -> dict[str, Any]:
        """What the oracle's ops take beside the buffers."""
        return known(self.scales, self.means, self.raw_rows)

    def _loud(self, b: int, edges: Sequence[int]) -> list[tuple[int, int]]:
        """(key, query) pairs: the first key that a query must not see, the last that it must, tile edges."""
        n, m, window = self.kv_lens[b], self.q_lens[b], self.spec.attention.window
        if m == 0:
            return []
        found = [(t, (t * 7) % m) for e in edges for t in (e - 1, e)]
        for i in range(m):
            position = n - m + i
            found.append((position, i) if i % 2 or i == m - 1 else (position + 1, i))
            if window is not None:
                found.append((position - window, i) if i % 2 else (position - window - 1, i))
        return [(t, i) for t, i in found if 0 <= t < n]

    def _forget_unseen(self) -> None:
        """Poison the pages that no query can see: masks have left them out."""
        size = self.spec.cache.page_size
        used = {page for pages in self.pages for page in pages}
        seen: set[int] = set()
        for b, (pages, m, n) in enumerate(zip(self.pages, self.q_lens, self.kv_lens, strict=True)):
            keys = self.terms.visible(b, int(self.starts[b]), m, n).any(axis=(0, 1))
            seen.update(pages[i] for i in np.unique(np.flatnonzero(keys) // size))
        gone = sorted(used - seen) if any(self.q_lens) else []
        if gone:
            poison = poisoned_pools(self.library, self.num_pages, self.num_raw)
            for plane in self.record.planes:
                reference.view(self.pools, self.record, plane.name, self.num_pages)[gone] = reference.view(
                    poison, self.record, plane.name, self.num_pages
                )[gone]
            if self.raw_rows is not None:
                rows = [row for row in self.raw_rows[gone] if row >= 0]
                self.pools["raw"].reshape(self.num_raw, -1)[rows] = 0xFF

    def cache(self) -> Any:
        """A ``Cache`` of the library that holds these bytes."""
        given = (self.scales, self.means, self.raw_rows)
        return cache_from(self.library, self.pools, self.num_pages, *given)

    def table(self, device: Any) -> Any:
        """(B, P) int32 with rows wider than any request needs, ids that fault in their tails, padded rows."""
        width = max((len(p) for p in self.pages), default=0) + 2
        full = np.resize(np.array(HUGE_IDS, np.int64).astype(np.int32), (max(1, len(self.pages)), width + 3))
        for row, pages in zip(full, self.pages, strict=False):
            row[: len(pages)] = pages
        return to_torch(full, "i32", device)[: len(self.pages), :width]

    def keys_and_values(self) -> tuple[list[Array], list[Array]]:
        """What the requests' pages stand for, f64 [len, kv_heads, d] each."""
        where = (self.spec, self.record, self.pools, self.num_pages, self.pages, self.kv_lens)
        return reference.gather(*where, **self.known)


def known(scales: dict[str, Array], means: dict[str, Array], raw_rows: Array | None) -> dict[str, Any]:
    """What the oracle's ops take beside the buffers of a cache; nothing that its spec does not have."""
    found: dict[str, Any] = {"scales": scales}
    if means:
        found["means"] = means
    return found if raw_rows is None else found | {"raw_rows": raw_rows}


def poisoned_pools(library: Library, num_pages: int, num_raw: int = 0) -> dict[str, Array]:
    """Buffers whose every float is NaN and whose every other code is of the largest magnitude."""
    pools = reference.new_pools(library.record, num_pages, fill=0xFF) | raw_pool(library.record, num_raw)
    for plane in library.record.planes:
        if plane.dtype in CODE_POISON:
            codes = reference.view(pools, library.record, plane.name, num_pages)
            codes.view(np.uint8)[...] = CODE_POISON[plane.dtype]
    return pools


def cache_from(
    library: Library,
    pools: dict[str, Array],
    num_pages: int,
    scales: dict[str, Array],
    means: dict[str, Array],
    raw_rows: Array | None = None,
) -> Any:
    """A new cache of ``library`` with the bytes of ``pools``, on the library's device."""
    import torch

    given = as_given(scales, means)
    if raw_rows is not None:
        given["raw_rows"] = len(pools["raw"]) // library.record.raw_bytes()
    cache = library.new_cache(num_pages, **given)
    for name, data in pools.items():
        cache.pools[name][: len(data)].copy_(torch.from_numpy(data))
    if raw_rows is not None:
        cache.raw_rows.copy_(torch.from_numpy(raw_rows))
    return cache


def bytes_of(cache: Any) -> dict[str, Array]:
    """A copy of the buffers of a cache, uint8 by pool name."""
    return {name: pool.cpu().numpy().copy() for name, pool in cache.pools.items()}


def to_torch(array: Array, dtype: str, device: Any = "cpu") -> Any:
    """A numpy array (bf16 as uint16 bits) as a torch tensor of ``dtype`` on ``device``."""
    import torch

    array = np.array(array, order="C")  # a copy: an op may write into the tensor
    if not array.size:  # numpy's strides of an empty array are 0, torch's are those of any other
        names = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        kind = names.get(dtype) or torch.from_numpy(array).dtype
        return torch.empty(array.shape, dtype=kind, device=device)
    if dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def from_torch(tensor: Any, dtype: str) -> Array:
    """A tensor as an array, bf16 as uint16 bits."""
    import torch

    whole = tensor.cpu().contiguous()
    found: Array = (whole.view(torch.int16) if dtype == "bf16" else whole).numpy()
    return found.view(NUMPY[dtype])


def padded(array: Array, dtype: str, device: Any) -> Any:
    """[T, H, D] as a tensor whose rows lie in a larger one of NaN: strides are honoured or it shows."""
    tokens, heads, width = array.shape
    full = np.full((tokens + 1, heads + 1, (width + 16) * array.itemsize), 0xFF, np.uint8).view(array.dtype)
    full[:tokens, :heads, :width] = array
    return to_torch(full, dtype, device)[:tokens, :heads, :width]


class Guarded:
    """An output of NaN inside a larger buffer of NaN, of which only the output may change."""

    def __init__(self, shape: Sequence[int], dtype: str, device: Any) -> None:
        """``shape``: (rows, heads) or (rows, heads, d)."""
        item = NUMPY[dtype].itemsize
        grown = [shape[0] + 2, shape[1] + 1, *(extent + 16 for extent in shape[2:])]
        raw = np.full((*grown[:-1], grown[-1] * item), 0xFF, np.uint8)
        self._full = to_torch(raw.view(NUMPY[dtype]), dtype, device)
        self._inside = (slice(1, shape[0] + 1), *(slice(0, extent) for extent in shape[1:]))
        self._dtype = dtype
        self.tensor = self._full[self._inside]

    def read(self) -> tuple[Array, bool]:
        """The output (bf16 as uint16 bits), and whether everything around it is untouched."""
        import torch

        whole = self._full.cpu()
        data = (whole.view(torch.int16) if self._dtype == "bf16" else whole).numpy()
        data = data.view(NUMPY[self._dtype])
        values = data[self._inside].copy()
        around = data.copy()
        around[self._inside] = np.full(data.itemsize, 0xFF, np.uint8).view(data.dtype)[0]
        return values, bool((around.view(np.uint8) == 0xFF).all())


class Workspace:
    """Scratch of exactly the bytes asked for, all NaN, with a guard behind it."""

    _GUARD = 256

    def __init__(self, nbytes: int, device: Any) -> None:
        self._full = to_torch(np.full(nbytes + self._GUARD, 0xFF, np.uint8), "u8", device)
        self.tensor = self._full[:nbytes]

    def intact(self) -> bool:
        """Whether the guard is untouched."""
        return bool((self._full[-self._GUARD :] == 0xFF).all())
