"""An engine over the tiny model, what it must say, and a count of its pages after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from kvgen.runtime.engine import Engine
from kvgen.runtime.layers import Layer
from kvgen.runtime.request import Event
from tests.support.engines import library
from tests.support.tiny_model import SPEC, TinyModel, prompts

PROMPTS = prompts(1, 5, 9, 17, 3, 12)
COUNT = 14


def new_engine(
    num_pages: int = 64, spec: Any = SPEC, model: TinyModel | None = None, **options: Any
) -> Engine:
    """An engine whose pages are full of NaN."""
    engine = Engine(model or TinyModel(spec), library("portable", spec), num_pages=num_pages, **options)
    poison(engine.layers)
    return engine


@lru_cache
def exact(spec: Any = SPEC) -> list[list[int]]:
    model = TinyModel(spec)
    return [model.exact_greedy(prompt, COUNT) for prompt in PROMPTS]


def run(engine: Engine) -> Iterator[Event]:
    """All events until the engine is idle; its pages are counted after every step."""
    while not engine.idle:
        yield from engine.step()
        check_pages(engine)
    assert engine.store.pool.free == engine.store.pool.total


def tokens(events: Sequence[Event], request: int) -> list[int]:
    return [event.token for event in events if event.kind == "token" and event.request == request]


def poison(layers: Sequence[Layer]) -> None:
    """Make every byte of every page 0xFF, which is NaN in all float formats."""
    for layer in layers:
        for pool in layer.cache.pools.values():
            pool.fill_(255)


def check_pages(engine: Engine) -> None:
    """Every page is free or held by exactly the running requests that list it; who waits holds none.

    Every raw row belongs to no page or to one, and all pages with raw tokens have one.
    """
    pool, scheduler = engine.store.pool, engine.scheduler
    held = Counter(page for request in scheduler.running for page in request.sequence.table.tolist())
    assert [pool.holders(page) for page in range(pool.total)] == [held[page] for page in range(pool.total)]
    assert pool.used == len(held) and pool.free + pool.used == pool.total
    assert len(scheduler.running) <= scheduler.max_batch
    rows = engine.store.rows
    found = [rows.row(page) for page in range(pool.total) if rows.row(page) >= 0]
    assert len(set(found)) == len(found) == rows.total - rows.free
    for sequence in (request.sequence for request in scheduler.running):
        raw = {int(sequence.table[index]) for index in rows.needed(sequence.length)}
        may = {int(sequence.table[index]) for index in rows.pages(sequence.length)}
        has = {page for page in sequence.table.tolist() if rows.row(page) >= 0}
        assert raw <= has <= may
    assert not any(request.sequence.num_pages for request in scheduler.waiting)
    for request in scheduler.running:
        assert request.sequence.num_pages == engine.store.pages(request.sequence.length)
    for queue in (scheduler.running, scheduler.waiting):
        ids = [request.id for request in queue]
        assert ids == sorted(set(ids)), "oldest first"
