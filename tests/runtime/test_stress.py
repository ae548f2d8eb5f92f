"""Any order of add, fork, abort and step in pools too small for all: right tokens, every page counted."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgen.runtime.engine import Engine
from tests.support.engines import library
from tests.support.tiny_engine import check_pages, poison
from tests.support.tiny_model import SPEC, TinyModel, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = prompts(1, 4, 7, 13, 22, 2, seed=2)
MOST = 16
"""Most new tokens of a request."""


@lru_cache
def exact(at: int) -> list[int]:
    return TinyModel().exact_greedy(PROMPTS[at], MOST)


class Stress(RuleBasedStateMachine):
    """Knows of each living request what it has still to say."""

    @initialize(pages=st.integers(10, 24), max_batch=st.integers(1, 6), extra=st.integers(0, 12))
    def start(self, pages: int, max_batch: int, extra: int) -> None:
        lib = library("portable", SPEC)
        chunk = max_batch + extra
        self.engine = Engine(TinyModel(), lib, num_pages=pages, max_batch=max_batch, chunk=chunk)
        poison(self.engine.layers)
        self.rest: dict[int, list[int]] = {}

    @rule(at=st.integers(0, len(PROMPTS) - 1), count=st.integers(1, MOST))
    def add(self, at: int, count: int) -> None:
        self.rest[self.engine.add(PROMPTS[at], max_new_tokens=count)] = exact(at)[:count]

    @precondition(lambda self: self.rest)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.rest)))
        self.rest[self.engine.fork(parent)] = list(self.rest[parent])

    @precondition(lambda self: self.rest)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.rest)))
        assert self.engine.abort(request)
        del self.rest[request]

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            for event in self.engine.step():
                if event.kind == "token":
                    assert event.token == self.rest[event.request].pop(0)
                elif event.kind == "finished":
                    assert self.rest.pop(event.request) == []
            check_pages(self.engine)

    @invariant()
    def pages_add_up(self) -> None:
        check_pages(self.engine)
        assert self.engine.idle == (not self.rest)

    def teardown(self) -> None:
        """The queue drains, in fewer steps than there could be tokens to compute."""
        if hasattr(self, "engine"):
            for _ in range(100 * (len(self.rest) + 1)):
                if self.engine.idle:
                    break
                self.step(1)
            assert self.engine.idle and self.engine.store.pool.used == 0


TestStress = Stress.TestCase
TestStress.settings = settings(max_examples=30, stateful_step_count=30)
