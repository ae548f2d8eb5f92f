"""Scheduler: who computes what in a step, who is let in, and who gives way; no model, no kernel."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime.layers import new_layers
from kvgen.runtime.request import Request
from kvgen.runtime.sampling import Greedy
from kvgen.runtime.scheduler import Plan, Scheduler
from kvgen.runtime.sequence import PagedSequence, PageStore
from tests.support.engines import library
from tests.support.tiny_model import SPEC


class Queue:
    """A scheduler over ``pages`` pages of 4 tokens, and a model whose every token is 0."""

    def __init__(self, pages: int, *requests: tuple[int, int], max_batch: int = 8, chunk: int = 16) -> None:
        self.store = PageStore(new_layers(library("portable", SPEC), pages, layers=1))
        self.scheduler = Scheduler(self.store, max_batch=max_batch, chunk=chunk, max_positions=1000)
        self.count = 0
        for prompt, new in requests:
            self.add(prompt, new)

    def add(self, prompt: int, new: int) -> None:
        self.scheduler.check(prompt, new)
        sequence = PagedSequence(self.store)
        request = Request(self.count, [0] * prompt, prompt, prompt + new, Greedy(), frozenset(), sequence)
        self.scheduler.add(request)
        self.count += 1

    def fork(self, at: int, new: int) -> None:
        parent = self.scheduler.running[at]
        tokens, decoding = list(parent.tokens), parent.decoding
        limit, sequence = len(tokens) + new, parent.sequence.fork()
        request = Request(self.count, tokens, parent.prompt, limit, Greedy(), frozenset(), sequence, decoding)
        self.scheduler.add(request)
        self.count += 1

    def step(self) -> tuple[list[tuple[int, int]], list[int]]:
        """(id, rows) of each request that computes, in the step's order, and the ids of the preempted."""
        plan = Plan()
        self.scheduler.fill(plan)
        for request, rows in plan.work:
            assert request in self.scheduler.running and rows.sample == (not request.pending)
            if rows.sample:
                request.tokens.append(0)
                request.decoding = True
                if len(request.tokens) == request.limit:
                    self.scheduler.remove(request)
        return [(r.id, len(rows.tokens)) for r, rows in plan.work], [r.id for r in plan.preempted]

    def drain(self) -> tuple[list[int], list[int]]:
        """All ids as they compute for the last time, and all preempted."""
        last, preempted = [], []
        while self.scheduler.waiting or self.scheduler.running:
            alive = {r.id for r in self.scheduler.waiting + self.scheduler.running}
            work, gave_way = self.step()
            assert work, "nothing computes, but requests are left"
            preempted += gave_way
            last += sorted(alive - {r.id for r in self.scheduler.waiting + self.scheduler.running})
        assert self.store.pool.free == self.store.pool.total
        return last, preempted


def test_decodes_go_first_then_prompts_in_pieces() -> None:
    queue = Queue(64, (12, 5), (3, 5), (2, 5), (20, 5), chunk=8)
    assert queue.step()[0] == [(0, 8)]
    assert queue.step()[0] == [(0, 4), (1, 3), (2, 1)]
    assert queue.step()[0] == [(0, 1), (1, 1), (2, 1), (3, 5)]
    assert queue.step()[0] == [(0, 1), (1, 1), (2, 1), (3, 5)]


def test_a_younger_fork_decodes_before_an_older_prompt() -> None:
    queue = Queue(64, (4, 9), (20, 5), chunk=8)
    assert queue.step()[0] == [(0, 4), (1, 4)]
    queue.fork(0, 5)
    assert queue.step()[0] == [(0, 1), (2, 1), (1, 6)]


def test_a_fork_that_gives_way_to_an_older_prompt_leaves_the_step() -> None:
    queue = Queue(7, (4, 20), (16, 4), max_batch=4, chunk=4)
    queue.step()
    queue.step()
    queue.fork(0, 9)
    queue.fork(0, 9)
    gone = []
    for _ in range(6):
        work, preempted = queue.step()
        assert not {request for request, _ in work} & set(preempted)
        gone += [(len(work), preempted)] if preempted else []
    assert gone == [(3, [3]), (2, [2])]
    assert sorted(queue.drain()[0]) == [0, 1, 2, 3]


def test_requests_with_many_rows_stand_last() -> None:
    queue = Queue(64, (9, 5), (8, 5), (12, 5), (2, 5), chunk=64)
    assert queue.step()[0] == [(1, 8), (3, 2), (0, 9), (2, 12)]


def test_no_more_than_max_batch_run() -> None:
    queue = Queue(64, (4, 2), (4, 9), (4, 9), max_batch=2)
    assert queue.step()[0] == [(0, 4), (1, 4)]
    assert queue.step()[0] == [(0, 1), (1, 1)]
    assert queue.step()[0] == [(1, 1), (2, 4)]


def test_line_33_two_prompts_of_six_tenths_of_the_pool_each() -> None:
    """In pieces, so that at first most of the pool looks free."""
    queue = Queue(10, (24, 8), (24, 8), chunk=8)
    assert queue.drain() == ([0, 1], [])


def test_a_prompt_is_let_in_only_with_a_page_to_spare() -> None:
    assert Queue(4, (8, 8), (8, 8)).step()[0] == [(0, 8)]
    assert Queue(5, (8, 8), (8, 8)).step()[0] == [(0, 8), (1, 8)]
    assert Queue(4, (8, 8), (7, 1)).step()[0] == [(0, 8), (1, 7)], "the second never needs a third page"


def test_a_request_that_fills_the_whole_pool_is_served() -> None:
    for prompt in (1, 15, 16, 19):
        queue = Queue(5, (3, 6), (prompt, 20 - prompt), (2, 7))
        assert sorted(queue.drain()[0]) == [0, 1, 2]


def test_the_youngest_gives_way_and_comes_back() -> None:
    queue = Queue(6, (3, 17), (3, 17), (3, 9))
    last, preempted = queue.drain()
    assert last == [0, 1, 2]
    assert preempted and 0 not in preempted
    assert preempted[0] == 2


def test_who_was_preempted_goes_before_later_arrivals() -> None:
    queue = Queue(6, (3, 17), (3, 17))
    while not (gone := queue.step()[1]):
        pass
    assert gone == [1]
    queue.add(1, 1)
    assert [r.id for r in queue.scheduler.waiting] == [1, 2]
    assert queue.drain()[0][0] == 0


@pytest.mark.parametrize(
    "prompt, new, reason",
    [
        (5, 0, "max_new_tokens = 0: give 1 to 15 .the prompt has 5 tokens"),
        (
            5,
            16,
            r"max_new_tokens = 16: 21 with .* 5 tokens, .* \(5 pages of 4 tokens\) holds 20; .* at most 15",
        ),
        (20, 1, "holds 20; shorten the prompt"),
        (5, 996, r"1001 with .* 5 tokens, .* \(5 pages of 4 tokens\) holds 20; give at most 15"),
    ],
)
def test_line_32_what_can_never_fit(prompt: int, new: int, reason: str) -> None:
    queue = Queue(5, (5, 15))
    with pytest.raises(ArgumentError, match=reason):
        queue.add(prompt, new)
    assert queue.drain() == ([0], [])


def test_the_lower_of_two_limits_is_told() -> None:
    with pytest.raises(ArgumentError, match="but the model has positions for 1000; give at most 995"):
        Queue(300).add(5, 996)


@pytest.mark.parametrize(
    "options, reason",
    [({"max_batch": 0}, "max_batch = 0"), ({"max_batch": 9, "chunk": 8}, "chunk = 8: 9 decoding requests")],
)
def test_budgets_that_starve_someone_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        Queue(5, **options)
