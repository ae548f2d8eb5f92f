"""Pools, sequences, samplings and engines given what is no number: an error, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.runtime.layers import new_layers
from kvgen.runtime.pool import OutOfPages, PagePool
from kvgen.runtime.sampling import Sampled
from kvgen.runtime.sequence import PagedSequence, PageStore
from tests.support.engines import library
from tests.support.tiny_engine import check_pages, new_engine
from tests.support.tiny_model import SPEC


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


NO_INTEGER = [
    *(None, True, 1.0, 0.5, float("nan"), float("inf"), "1", b"1", [1], {}, 1j, object(), int, Unprintable()),
    *(np.array([1, 2]), np.float32(1), torch.ones(2), torch.tensor(0.5), -1, -(10**5000)),
]
each = pytest.mark.parametrize("value", NO_INTEGER, ids=lambda value: type(value).__name__)


@each
def test_pool(value: Any) -> None:
    pool = PagePool(5)
    held = pool.allocate(3)
    for run in (
        lambda: PagePool(value),
        lambda: pool.allocate(value),
        lambda: pool.holders(value),
        lambda: pool.retain([held[0], value]),
        lambda: pool.release([held[0], value]),
    ):
        with pytest.raises(ArgumentError):
            run()
    assert [pool.holders(page) for page in range(5)] == [1, 1, 1, 0, 0]
    assert pool.allocate(2) == [3, 4]


def test_numbers_of_any_size() -> None:
    pool = PagePool(np.int64(3))  # type: ignore[arg-type]
    for count in (4, 2**63 - 1):
        with pytest.raises(OutOfPages):
            pool.allocate(count)
    for run in (
        lambda: pool.allocate(10**5000),
        lambda: PagePool(10**5000),
        lambda: PagePool(2**31),
        lambda: pool.holders(3),
    ):
        with pytest.raises(ArgumentError):
            run()
    for pages in (5, None, 0.5, torch.float32):
        with pytest.raises(ArgumentError, match="pages = "):
            pool.retain(pages)  # type: ignore[arg-type]
    assert pool.free == 3


@each
def test_sequence(value: Any) -> None:
    sequence = PagedSequence(PageStore(new_layers(library("portable", SPEC), 6, layers=2)))
    sequence.reserve(6)
    for method in (sequence.reserve, sequence.truncate, sequence.pages_needed):
        with pytest.raises(ArgumentError):
            method(value)
    assert (sequence.length, sequence.num_pages, sequence.store.pool.free) == (6, 2, 4)


@each
@pytest.mark.parametrize("name", ["top_k", "seed", "temperature", "top_p"])
def test_sampling(name: str, value: Any) -> None:
    if name in ("temperature", "top_p") and isinstance(value, float | np.floating) and 0 < value < 2:
        Sampled(**{name: value}).draw(np.linspace(-1, 1, 9), 3)
        return
    if name == "seed" and value is None:
        return  # each request its own
    with pytest.raises(ArgumentError, match=f"^{name} = "):
        Sampled(**{name: value})


@each
def test_engine(value: Any) -> None:
    engine = new_engine(num_pages=9, max_batch=3, chunk=8)
    first = engine.add([1, 2, 3], max_new_tokens=3)
    more = {"max_new_tokens": 2}
    bad: list[Callable[[], Any]] = [
        lambda: engine.add([1, 2], max_new_tokens=value),
        lambda: engine.add([1, value], **more),
        lambda: engine.add([1, 2], sampling=value, **more),
        lambda: engine.abort(value),
        lambda: engine.fork(value),
        lambda: new_engine(num_pages=9, max_batch=value),
        lambda: new_engine(num_pages=9, chunk=value),
        lambda: new_engine(num_pages=value),
    ]
    if value is not None:
        bad.append(lambda: engine.fork(first, max_new_tokens=value))
    if not isinstance(value, int):  # any token may end a request, also one that never comes
        bad.append(lambda: engine.add([1, 2], stop=[value], **more))
    if not isinstance(value, list | dict | np.ndarray | bytes):
        bad.append(lambda: engine.add(value, **more))
        bad.append(lambda: engine.add([1, 2], stop=value, **more))
    for run in bad:
        with pytest.raises(ArgumentError):
            run()
    while not engine.idle:
        engine.step()
        check_pages(engine)
    assert engine.store.pool.used == 0
    if not isinstance(value, list | dict | np.ndarray | bytes):
        for prompts in (value, [value]):
            with pytest.raises(ArgumentError):
                engine.generate(prompts, **more)
    assert engine.idle


def test_a_prompt_whose_memory_is_gone() -> None:
    gone = torch.zeros(3, dtype=torch.int64)
    gone.untyped_storage().resize_(0)
    for prompt in (gone, [gone]):
        with pytest.raises(ArgumentError, match="without memory"):
            new_engine().add(prompt, max_new_tokens=1)
