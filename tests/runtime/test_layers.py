"""Layers: each its own library and cache, page ids for all; what cannot share pages is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.runtime.engine import Engine
from kvgen.runtime.layers import new_layers
from kvgen.runtime.sequence import PagedSequence, PageStore
from tests.support.engines import library
from tests.support.specs import make_spec
from tests.support.tiny_engine import COUNT, PROMPTS, poison, run, tokens
from tests.support.tiny_model import SPEC, TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")


def spec(**changes: Any) -> Any:
    return make_spec("f32", "f32", **({"page_size": 4, "kv_heads": 2, "group": 2, "head_dim": 16} | changes))


WINDOWED = spec(mask=(True, 5))
HALF = make_spec("bf16", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)


@pytest.mark.parametrize("specs", [(SPEC, WINDOWED), (WINDOWED, SPEC)], ids=["last", "first"])
@pytest.mark.parametrize("options", [{}, {"max_batch": 3, "chunk": 7}, {"num_pages": 8}], ids=str)
def test_layers_that_differ_share_pages(options: dict[str, Any], specs: tuple[Any, Any]) -> None:
    model = TinyModel(*specs)
    want = [model.exact_greedy(prompt, COUNT) for prompt in PROMPTS]
    libraries = [library("portable", each) for each in specs]
    engine = Engine(model, libraries, **({"num_pages": 64} | options))
    poison(engine.layers)
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events = list(run(engine))
    assert [tokens(events, i) for i in ids] == want
    assert want != [TinyModel(specs[0]).exact_greedy(prompt, COUNT) for prompt in PROMPTS], "the window tells"


def test_a_fork_copies_its_page_in_the_layers_of_all_kinds() -> None:
    specs = (SPEC, HALF, SPEC)
    store = PageStore(new_layers([library("portable", each) for each in specs], 8, layers=3))
    poison(store.layers)
    parent = PagedSequence(store)
    parent.reserve(2)
    rows = torch.arange(2.0)[:, None, None].expand(2, 2, 16).contiguous()
    for at, layer in enumerate(store.layers):
        layer.library.append(layer.cache, rows + at, rows - at, torch.tensor([0, 1]))
    child = parent.fork()
    child.reserve(1)
    table, lens = torch.tensor(child.table)[None], torch.tensor([2], dtype=torch.int32)
    assert table.tolist() == [[1]]
    for at, layer in enumerate(store.layers):
        k, v = layer.library.gather(layer.cache, table, lens)
        assert torch.equal(k.float(), rows + at) and torch.equal(v.float(), rows - at)


def test_layers_of_one_spec_lie_in_one_slab() -> None:
    one, other = library("portable", SPEC), library("portable", HALF)
    first, half, last = new_layers([one, other, one], 8, layers=3)
    (pool,), (next_pool,) = first.cache.pools.values(), last.cache.pools.values()
    assert next_pool.data_ptr() - pool.data_ptr() == pool.nbytes
    assert first.cache.layers == (first.cache, last.cache) and half.cache.layers == (half.cache,)


@pytest.mark.parametrize(
    ("libraries", "match"),
    [
        ([SPEC], "1 of them for 2 layers; give one for each layer, or one for all"),
        ([SPEC, spec(page_size=8)], r"library\[1\]: page_size 8, but the first layer's is 4"),
        ([SPEC, spec(mask=(False, None))], "causal = False"),
    ],
    ids=["count", "page size", "mask"],
)
def test_libraries_that_cannot_share_pages(libraries: list[Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Engine(TinyModel(), [library("portable", each) for each in libraries], num_pages=4)


@pytest.mark.parametrize("given", [None, "lib", 3, [None, None]], ids=str)
def test_what_is_no_library(given: Any) -> None:
    with pytest.raises(ArgumentError, match="library"):
        Engine(TinyModel(), given, num_pages=4)
