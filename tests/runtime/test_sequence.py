"""PagedSequence: fork, truncate and copy-on-write, byte for byte against plain lists of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgen.errors import ArgumentError
from kvgen.runtime.layers import new_layers
from kvgen.runtime.pool import OutOfPages
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import Rows, build_step
from tests.support.engines import library
from tests.support.specs import make_spec
from tests.support.tiny_engine import poison

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = make_spec("f32", "f32", page_size=4, kv_heads=2, group=1, head_dim=16)
LAYERS = 2


def new_store(pages: int = 10) -> PageStore:
    """A store of NaN, so that a token read from a page that nobody wrote shows."""
    store = PageStore(new_layers(library("portable", SPEC), pages, layers=LAYERS))
    poison(store.layers)
    return store


def keys(tokens: list[int], layer: int) -> torch.Tensor:
    """The K rows of tokens; the V rows are their negatives."""
    att = SPEC.attention
    return (
        (torch.tensor(tokens) * LAYERS + layer).float()[:, None, None].expand(-1, att.kv_heads, att.head_dim)
    )


def extend(sequence: PagedSequence, tokens: list[int]) -> None:
    sequence.reserve(len(tokens))
    slots = build_step([Rows(sequence, tokens, False)]).slots_T
    for at, layer in enumerate(sequence.store.layers):
        k = keys(tokens, at).contiguous()
        layer.library.append(layer.cache, k, -k, slots)


def holds(sequence: PagedSequence, tokens: list[int]) -> None:
    assert sequence.length == len(tokens)
    assert sequence.num_pages == sequence.store.pages(len(tokens))
    table, lens = torch.tensor(sequence.table)[None], torch.tensor([len(tokens)], dtype=torch.int32)
    for at, layer in enumerate(sequence.store.layers):
        k, v = layer.library.gather(layer.cache, table, lens)
        assert torch.equal(k, keys(tokens, at)) and torch.equal(v, -k)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_of_three_holders_writes_into_its_own_copy(order: tuple[int, ...]) -> None:
    store = new_store()
    parent = PagedSequence(store)
    extend(parent, [1, 2, 3, 4, 5, 6])
    family = [parent, parent.fork(), parent.fork()]
    assert store.pool.used == 2
    for n, at in enumerate(order):
        extend(family[at], [10 + at])
        # The last to write keeps the page that both others have left.
        assert store.pool.used == 2 + min(n + 1, 2)
    for at, sequence in enumerate(family):
        holds(sequence, [1, 2, 3, 4, 5, 6, 10 + at])


def test_a_full_page_stays_shared_until_someone_cuts_into_it() -> None:
    store = new_store()
    parent = PagedSequence(store)
    extend(parent, [1, 2, 3, 4])
    child = parent.fork()
    extend(child, [5])
    extend(parent, [6])
    assert child.table[0] == parent.table[0] and store.pool.used == 3
    child.truncate(2)
    extend(child, [7])
    assert child.table[0] != parent.table[0]
    holds(parent, [1, 2, 3, 4, 6])
    holds(child, [1, 2, 7])


def test_a_copy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store()
    parent = PagedSequence(store)
    extend(parent, [1, 2, 3])
    child = parent.fork()

    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(store, "copy_pages", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        child.reserve(6)
    assert store.pool.used == 1 and child.length == 3
    monkeypatch.undo()
    extend(child, [4])
    holds(parent, [1, 2, 3])
    holds(child, [1, 2, 3, 4])


def test_what_is_refused() -> None:
    sequence = PagedSequence(new_store())
    extend(sequence, [1, 2])
    for length in (-1, 3):
        with pytest.raises(ArgumentError, match=f"length = {length}: this sequence has 2"):
            sequence.truncate(length)
    with pytest.raises(ArgumentError, match="tokens = 0"):
        sequence.reserve(0)
    sequence.free()
    sequence.free()
    assert sequence.store.pool.used == 0


class Sequences(RuleBasedStateMachine):
    """Any appends, forks, truncations and frees; every token is a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.store = new_store()
        self.pairs: list[tuple[PagedSequence, list[int]]] = []
        self.next = 1

    def pick(self, data: st.DataObject) -> tuple[PagedSequence, list[int]]:
        return self.pairs[data.draw(st.integers(0, len(self.pairs) - 1))]

    @precondition(lambda self: len(self.pairs) < 5)
    @rule()
    def new(self) -> None:
        self.pairs.append((PagedSequence(self.store), []))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), count=st.integers(1, 9))
    def append(self, data: st.DataObject, count: int) -> None:
        sequence, tokens = self.pick(data)
        fresh = list(range(self.next, self.next + count))
        self.next += count
        need, free = sequence.pages_needed(count), self.store.pool.free
        if need > free:
            with pytest.raises(OutOfPages):
                sequence.reserve(count)
        else:
            extend(sequence, fresh)
            tokens += fresh
            assert self.store.pool.free >= free - need

    @precondition(lambda self: self.pairs and len(self.pairs) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence, tokens = self.pick(data)
        self.pairs.append((sequence.fork(), list(tokens)))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence, tokens = self.pick(data)
        length = data.draw(st.integers(0, len(tokens)))
        sequence.truncate(length)
        del tokens[length:]

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pair = self.pick(data)
        pair[0].free()
        self.pairs.remove(pair)

    @invariant()
    def all_hold_their_tokens(self) -> None:
        for sequence, tokens in self.pairs:
            holds(sequence, tokens)
        held = [page for sequence, _ in self.pairs for page in sequence.table.tolist()]
        assert [self.store.pool.holders(page) for page in range(10)] == [held.count(p) for p in range(10)]


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=50, stateful_step_count=30)
