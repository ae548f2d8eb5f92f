"""Scheduler: which requests compute how many tokens in the next step (continuous batching).

Older requests go first in everything. A step has a budget of ``chunk`` tokens: decoding requests take one
each, and prompts take the rest in the order of arrival, in pieces where they are longer. When pages run out
the youngest request gives up its own and waits; it computes its tokens anew later. The oldest can thus
always go on, and since ``check`` lets in only what fits into the pool alone, the queue drains. Raw rows are
counted like pages.

Where tokens wait to become codes, what a query sees as codes depends on where its piece ends. There a
request is cut by a grid of its own, whatever else is in the step: a prompt at multiples of ``piece``, as many
whole blocks as ``chunk`` holds (at least one), and generated tokens one by one, after a preemption too. A
piece is not cut where the budget is short; the last one of a step may exceed it.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from kvgen.errors import ArgumentError
from kvgen.runtime.arguments import INT64, need_integer
from kvgen.runtime.raw import most_rows
from kvgen.runtime.request import Request
from kvgen.runtime.sequence import PageStore
from kvgen.runtime.step import DECODE_ROWS, Rows

Work = tuple[Request, Rows]

by_age = attrgetter("id")


@dataclass
class Plan:
    """What a step computes, in the order that ``build_step`` wants, and who had to give up pages for it."""

    work: list[Work] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Requests that wait (without pages) and that run (with pages), both oldest first."""

    def __init__(self, store: PageStore, *, max_batch: int, chunk: int, max_positions: int) -> None:
        max_batch = need_integer("max_batch", max_batch, 1, INT64, "give at least 1 request a step")
        reason = f"{max_batch} decoding requests (max_batch) take a token each"
        chunk = need_integer(
            "chunk", chunk, max_batch, INT64, f"{reason}; give at least that many tokens a step"
        )
        self.store = store
        self.max_batch = max_batch
        self.chunk = chunk
        self.max_positions = max_positions
        block = store.rows.block
        self.piece = max(chunk // block * block, block) if store.rows.waits else 0
        """Tokens between two cuts of a prompt; 0 where a request may be cut anywhere."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def check(self, tokens: int, new: int) -> None:
        """Refuse a request of ``tokens`` tokens and ``new`` more that could never finish."""
        pages, page = self.store.pool.total, self.store.page_size
        room = min(self.max_positions, pages * page) - tokens
        hint = f"give 1 to {room}" if room > 0 else "give at least 1"
        need_integer("max_new_tokens", new, 1, INT64, f"{hint} (the prompt has {tokens} tokens)")
        limit, holder = min(
            (self.max_positions, "the model has positions for"),
            (pages * page, f"the pool ({pages} pages of {page} tokens) holds"),
        )
        if tokens + new > limit:
            hint = f"give at most {room}" if room > 0 else "shorten the prompt"
            total = f"{tokens + new} with the prompt's {tokens} tokens"
            raise ArgumentError(f"max_new_tokens = {new}: {total}, but {holder} {limit}; {hint}")
        rows = self.store.rows
        most = min(most_rows(rows.specs)[1], self.store.pages(tokens + new))
        if most > rows.total:
            reason = f"a request of {tokens + new} tokens may hold {most} at a time"
            raise ArgumentError(f"raw_rows = {rows.total}: {reason}; give at least {most}")

    def add(self, request: Request) -> None:
        """Take in a request: it runs at once if it has pages (a fork), else it waits for them."""
        insort(self.running if request.sequence.num_pages else self.waiting, request, key=by_age)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not, and free its pages."""
        (self.running if request in self.running else self.waiting).remove(request)
        request.sequence.free()

    def preempt(self, request: Request) -> None:
        """Take the pages of a running request, which waits and computes its tokens anew later."""
        self.running.remove(request)
        request.sequence.free()
        request.decoding = False
        insort(self.waiting, request, key=by_age)

    def fill(self, plan: Plan) -> None:
        """Choose the next step's work and reserve the room for it."""
        budget = self.chunk
        for request in sorted(self.running, key=lambda request: not request.decoding):
            if budget > 0 and request not in plan.preempted:
                budget -= self._schedule(request, budget, plan)
        # With budget left no running prompt lacks pages, so the free ones are promised to no request. What a
        # preempted request gave up did not suffice with them for an older one: it is too little for itself.
        while budget > 0 and self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.pop(0)
            self.running.append(request)
            self.running.sort(key=by_age)
            budget -= self._schedule(request, budget, plan)
        plan.work.sort(key=lambda item: len(item[1].tokens) > DECODE_ROWS)

    def _fits(self, request: Request) -> bool:
        """Whether all tokens of a waiting request fit, and a page more where it may come to need one; raw
        rows likewise."""
        if len(self.running) >= self.max_batch:
            return False
        pages, rows = self.store.pages, self.store.rows
        if rows.specs and min(most_rows(rows.specs)[0] + 1, pages(request.limit)) > rows.free:
            return False
        return min(pages(len(request.tokens)) + 1, pages(request.limit)) <= self.store.pool.free

    def _schedule(self, request: Request, budget: int, plan: Plan) -> int:
        """Reserve room for the request's next tokens; returns how many, 0 if it gave up its own pages."""
        sequence, count = request.sequence, self._piece(request, budget)
        pool, raw = self.store.pool, self.store.rows
        while sequence.pages_needed(count) > pool.free or sequence.rows_needed(count) > raw.free:
            victim = self.running[-1]
            plan.preempted.append(victim)
            self.preempt(victim)
            plan.work = [item for item in plan.work if item[0] is not victim]
            if victim is request:
                return 0
        start = sequence.length
        sequence.reserve(count)
        rows = Rows(sequence, request.tokens[start : start + count], sample=not request.pending)
        plan.work.append((request, rows))
        return count

    def _piece(self, request: Request, budget: int) -> int:
        """How many tokens a request computes next: up to ``budget``, or to the next cut of its grid."""
        done = request.sequence.length
        if not self.piece:
            return min(request.pending, budget)
        return min(self.piece - done % self.piece, request.prompt - done) if done < request.prompt else 1
