"""PagePool: counts, order of reuse, errors that change nothing, and any run of calls against a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgen.errors import ArgumentError
from kvgen.runtime.pool import OutOfPages, PagePool


def state(pool: PagePool) -> list[Any]:
    return [pool.free, pool.used, *(pool.holders(page) for page in range(pool.total))]


def test_pages_come_back_in_the_order_in_which_they_were_freed() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([2, 0])
    assert pool.allocate(3) == [3, 2, 0]


@pytest.mark.parametrize("pages", [[1, 1], [0, 1, 1], [2]])
@pytest.mark.parametrize("what", ["release", "retain"])
def test_line_29_a_page_freed_twice(pages: list[int], what: str) -> None:
    pool = PagePool(3)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(ArgumentError, match=f"page {pages[-1]}: "):
        getattr(pool, what)(pages)
    assert state(pool) == before
    pool.release([1])
    with pytest.raises(ArgumentError, match="page 1: cannot release a free page"):
        pool.release([0, 1])
    assert sorted(pool.allocate(2)) == [1, 2], "a page was free twice"


def test_a_page_twice_in_one_call_is_an_error_even_with_two_holders() -> None:
    pool = PagePool(2)
    pool.retain(pool.allocate(1))
    with pytest.raises(ArgumentError, match="page 0: named twice"):
        pool.release([0, 0])
    assert pool.holders(0) == 2


def test_out_of_pages_takes_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="3 pages asked for, but 2 of 3 are free"):
        pool.allocate(3)
    assert (pool.free, pool.used) == (2, 1)
    assert pool.allocate(0) == []


@pytest.mark.parametrize("total", [0, -1, 2.0, True])
def test_a_pool_of_no_pages_is_refused(total: Any) -> None:
    with pytest.raises(ArgumentError, match="give a positive number of pages"):
        PagePool(total)


@pytest.mark.parametrize("page", [-1, 3])
def test_pages_outside_the_pool_are_refused(page: int) -> None:
    with pytest.raises(ArgumentError, match=f"page {page}: the pool has pages 0 to 2"):
        PagePool(3).release([page])
    with pytest.raises(ArgumentError, match="count = -1"):
        PagePool(3).allocate(-1)


class Pools(RuleBasedStateMachine):
    """Any calls, right or wrong, on a pool and on a Counter of holders."""

    TOTAL = 6
    some_pages = st.lists(st.integers(-1, TOTAL), max_size=4)

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.held = PagePool(self.TOTAL), Counter[int]()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.TOTAL - len(self.held):
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count and not self.held.keys() & set(pages)
        self.held.update(pages)

    @rule(pages=some_pages, more=st.booleans())
    def change(self, pages: list[int], more: bool) -> None:
        call = self.pool.retain if more else self.pool.release
        if len(set(pages)) < len(pages) or not set(pages) <= self.held.keys():
            with pytest.raises(ArgumentError):
                call(pages)
            return
        call(pages)
        self.held.update(dict.fromkeys(pages, 1 if more else -1))
        self.held = +self.held

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pool.holders(page) for page in range(self.TOTAL)] == [
            self.held[page] for page in range(self.TOTAL)
        ]
        assert self.pool.used == len(self.held)
        assert self.pool.free + self.pool.used == self.pool.total == self.TOTAL


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=100, stateful_step_count=40)
