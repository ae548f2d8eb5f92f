"""Open blocks: any appends, forks, truncations, copies and frees of sequences over one cache.

A twin of the cache belongs to the oracle, which does the same. After every step all bytes of the two are the
same, poison included; so is what gather returns and, within its tolerance, what decode does. Every page and
every raw row is accounted for exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.runtime import sequence as runtime_sequence
from kvgen.runtime.cache import torch_dtype
from kvgen.runtime.layers import Layer
from kvgen.runtime.pool import OutOfPages
from kvgen.runtime.raw import copy_rows
from kvgen.runtime.sequence import PagedSequence, PageStore
from tests.support.bundle import prepare
from tests.support.compare import assert_attention, differences
from tests.support.engines import cpu_library
from tests.support.oracle import OracleLibrary

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES, RAW_ROWS, MOST = 12, 9, 4
"""Few enough that pages and raw rows run out; and at most so many sequences."""

CHANNEL = {"head": 1, "tok": 8, "d": 1}
BLOCK = {"head": 1, "tok": 1, "d": 16}


def spec_of(q_dtype: str, k: dict[str, Any], v: dict[str, Any], **cache: Any) -> Spec:
    att = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "q_dtype": q_dtype}
    return load_spec({"name": "open", "attention": att, "cache": {"page_size": 8, "k": k, "v": v, **cache}})


SPECS = {
    "kivi-int4": spec_of(
        "f32",
        {"format": "int4", "affine": True, "group": CHANNEL},
        {"format": "int4", "affine": True, "group": BLOCK},
        keep_last=5,
    ),
    "kivi-int2": spec_of(
        "bf16",
        {"format": "int2", "affine": True, "group": CHANNEL, "scale_dtype": "f16"},
        {"format": "int2", "affine": True, "group": BLOCK, "scale_dtype": "bf16"},
        page_size=16,
    ),
    "int8-both-ends": spec_of("f32", {"format": "int8"}, {"format": "int8"}, keep_first=11, keep_last=6),
    "symmetric": spec_of(
        "f32",
        {"format": "int8", "group": {"head": 1, "tok": 4}},
        {"format": "e4m3", "group": {"head": 1, "tok": 2, "d": 16}},
        keep_first=3,
    ),
    "rotated": spec_of(
        "f16",
        {"format": "int4", "mean": True, "transform": "hadamard"},
        {"format": "int3", "transform": "hadamard", "group": BLOCK},
        keep_last=7,
    ),
}
MEAN = torch.linspace(-1, 1, 64).reshape(2, 32)


@lru_cache
def libraries() -> dict[str, Any]:
    """The library of each spec; what they need is compiled together."""
    found = {name: cpu_library(spec, "portable") for name, spec in SPECS.items()}
    kernels = [("append", "f32"), ("copy", ""), ("gather", "f32"), ("decode", "single")]
    prepare([(library, kernels) for library in found.values()])
    return found


class TwinStore(PageStore):
    """A store that copies pages of the oracle's cache too, and takes what is reopened over to it."""

    def __init__(self, spec: Spec, lib: Any) -> None:
        given: dict[str, Any] = {"means": {"k": MEAN}} if spec.cache.k.mean else {}
        self.oracle = OracleLibrary(spec)
        self.twin = self.oracle.new_cache(PAGES, raw_rows=RAW_ROWS, **given)
        cache = lib.new_cache(PAGES, raw_rows=RAW_ROWS, **given)
        for slab in (*cache.pools.values(), *self.twin.pools.values()):
            slab.fill_(255)
        super().__init__([Layer(lib, cache)])
        self.cache = cache

    def follow(self) -> None:
        self.twin.raw_rows.copy_(self.cache.raw_rows)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().copy_pages(sources, targets)
        self.follow()
        src, dst = (torch.tensor(list(pages), dtype=torch.int32) for pages in (sources, targets))
        self.oracle.copy(self.twin, src, dst)
        copy_rows(self.twin, src, dst)


class Blocks(RuleBasedStateMachine):
    name = "kivi-int4"

    def __init__(self) -> None:
        super().__init__()
        self.spec = SPECS[self.name]
        self.store = TwinStore(self.spec, libraries()[self.name])
        self.sequences: list[PagedSequence] = []
        self.noise = np.random.default_rng(0)

    def normal(self, rows: int, heads: int) -> torch.Tensor:
        width = self.spec.attention.head_dim
        size = np.exp2(np.arange(width) % 5 - 2)  # channels of different sizes
        return torch.from_numpy((self.noise.normal(size=(rows, heads, width)) * size).astype(np.float32))

    def pick(self, data: st.DataObject) -> PagedSequence:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]

    def tables(self, sequences: list[PagedSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Page tables, with ids behind their ends that no pool has, and lengths."""
        table = np.full((len(sequences), PAGES + 1), 2**31 - 1, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: sequence.num_pages] = sequence.table
        lens = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32)
        return torch.from_numpy(table), lens

    def state(self) -> tuple[Any, ...]:
        rows = self.store.rows
        each = [(s.length, s.num_pages, s.table.tolist()) for s in self.sequences]
        return self.store.pool.free, rows.free, rows._rows.tolist(), each

    @precondition(lambda self: len(self.sequences) < MOST)
    @rule()
    def new(self) -> None:
        self.sequences.append(PagedSequence(self.store))

    @precondition(lambda self: self.sequences)
    @rule(counts=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 21)), min_size=MOST, max_size=MOST))
    def append(self, counts: list[int]) -> None:
        """One call for several requests, of which some may have no new rows."""
        done = [0] * len(self.sequences)
        for at, (sequence, count) in enumerate(zip(self.sequences, counts, strict=False)):
            sequence.settle()
            if not count:
                continue
            pages, rows = sequence.pages_needed(count), sequence.rows_needed(count)
            before, pool, raw = self.state(), self.store.pool.free, self.store.rows.free
            if pages > pool or rows > raw:
                with pytest.raises(OutOfPages):
                    sequence.reserve(count)
                assert self.state() == before
                continue
            sequence.reserve(count)
            assert (self.store.pool.free, self.store.rows.free) == (pool - pages, raw - rows)
            done[at] = count
        self.store.follow()
        starts = torch.tensor(np.cumsum([0, *done]), dtype=torch.int32)
        table, lens = self.tables(self.sequences)
        k, v = self.normal(sum(done), 2), self.normal(sum(done), 2)
        where = {"page_table": table, "kv_lens": lens, "q_starts": starts}
        self.store.layers[0].library.append(self.store.cache, k, v, **where)
        self.store.oracle.append(self.store.twin, k, v, **where)

    @precondition(lambda self: self.sequences and len(self.sequences) < MOST)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        before = self.store.pool.free, self.store.rows.free
        parent = self.pick(data)
        parent.settle()
        self.sequences.append(parent.fork())
        assert self.store.pool.free == before[0]

    @precondition(lambda self: any(s.length for s in self.sequences))
    @rule(data=st.data(), most=st.sampled_from([3, 12, 99]))
    def truncate(self, data: st.DataObject, most: int) -> None:
        sequence = self.pick(data)
        length = data.draw(st.integers(max(0, sequence.length - most), sequence.length))
        before, opened = self.state(), list[int]()

        def note(layer: Any, table: Any, old: int, runs: Any, targets: Any) -> None:
            opened.extend(token for run in runs for token in range(*run))
            reopen(layer, table, old, runs, targets)

        reopen = runtime_sequence.reopen
        table, lens = self.tables([sequence])
        was = self.store.oracle.gather(self.store.twin, table, lens, dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime_sequence, "reopen", note)
            try:
                sequence.truncate(length)
            except OutOfPages:
                assert self.state() == before
                return
        self.store.follow()
        if opened:  # the values that codes stood for, in the query's precision
            for name in ("k_raw", "v_raw"):
                getattr(self.store.twin, name).copy_(getattr(self.store.cache, name))
            table, lens = self.tables([sequence])
            now = self.store.oracle.gather(self.store.twin, table, lens, dtype=torch.float32)
            step = {"f32": 2e-6, "bf16": 2.0**-8, "f16": 2.0**-9}[self.spec.attention.q_dtype]
            for side, old in zip(now, was, strict=True):
                assert not differences("reopened", side[opened], old[opened], step)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        sequence.free()
        self.sequences.remove(sequence)

    @invariant()
    def bytes_are_the_oracles(self) -> None:
        self.store.follow()
        for name, slab in self.store.cache.pools.items():
            assert torch.equal(slab, self.store.twin.pools[name]), name

    @invariant()
    def readers_agree(self) -> None:
        if not self.sequences:
            return
        table, lens = self.tables(self.sequences)
        lib, cache, twin = self.store.layers[0].library, self.store.cache, self.store.twin
        got = lib.gather(cache, table, lens, dtype=torch.float32)
        want = self.store.oracle.gather(twin, table, lens, dtype=torch.float32)
        for one, other in zip(got, want, strict=True):
            assert not differences("gather", one, other, 1e-6)
        kind = self.spec.attention.q_dtype
        q = self.normal(len(lens), 4).to(torch_dtype(kind))
        want = self.store.oracle.decode(q, twin, table, lens)
        assert_attention(lib.decode(q, cache, table, lens), want, kind)

    @invariant()
    def pages_and_raw_rows_add_up(self) -> None:
        pool, rows = self.store.pool, self.store.rows
        held = [page for sequence in self.sequences for page in sequence.table.tolist()]
        assert [pool.holders(page) for page in range(PAGES)] == [held.count(page) for page in range(PAGES)]
        need, may = set(), set()
        for s in self.sequences:
            need |= {int(s.table[i]) for i in rows.needed(s.length)}
            may |= {int(s.table[i]) for i in rows.pages(s.length) | rows.pages(s._settled) if i < s.num_pages}
        has = {page for page in range(PAGES) if rows.row(page) >= 0}
        assert need <= has <= may
        used = [rows.row(page) for page in has]
        assert sorted([*used, *rows._free]) == list(range(RAW_ROWS))
        assert self.store.cache.raw_rows.tolist() == [rows.row(page) for page in range(PAGES)]

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.free()
        assert self.store.pool.free == PAGES and self.store.rows.free == RAW_ROWS


def machine(name: str) -> Any:
    """The test case of one spec."""
    found = type(f"Blocks_{name}", (Blocks,), {"name": name}).TestCase
    found.settings = settings(max_examples=5, stateful_step_count=20)
    return found


TestKiviInt4 = machine("kivi-int4")
TestKiviInt2 = machine("kivi-int2")
TestInt8BothEnds = machine("int8-both-ends")
TestSymmetric = machine("symmetric")
TestRotated = machine("rotated")
