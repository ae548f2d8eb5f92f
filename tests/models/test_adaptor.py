"""The adaptor alone: logits of a mixed step, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.models import adaptor
from kvgen.models.bench import other_attention
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.kernels import built
from kvgen.models.pages import specs_for
from kvgen.runtime.layers import new_layers
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import Rows, build_step

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint("gqa-tied"))


@pytest.fixture
def store(model) -> PageStore:
    libraries = built(specs_for(model.shape, page_size=4))
    return PageStore(new_layers(libraries, 32, layers=model.num_layers))


def rows(store: PageStore, tokens: list[int], sequence: PagedSequence | None = None) -> Rows:
    sequence = sequence or PagedSequence(store)
    sequence.reserve(len(tokens))
    return Rows(sequence, tokens, sample=True)


def test_logits_of_a_mixed_step_are_those_of_each_text_alone(model, store: PageStore) -> None:
    texts = [[5, 6, 7, 8, 9], list(range(20, 50)), [3]]
    first = rows(store, texts[0])
    model.forward(build_step([first]), store.layers)
    step = build_step([rows(store, [11], first.sequence), rows(store, texts[2]), rows(store, texts[1])])
    assert step.num_decode == 2
    got = model.forward(step, store.layers)
    with other_attention(model.module, "eager"), torch.inference_mode():
        want = [
            model.module(torch.tensor([text])).logits[0, -1] for text in ([*texts[0], 11], texts[2], texts[1])
        ]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-4, atol=1e-4)
    assert got.dtype == torch.float32


def test_only_the_rows_that_sample_have_logits(model, store: PageStore) -> None:
    step = build_step([rows(store, [1, 2, 3]), rows(store, [4, 5])])
    both = model.forward(step, store.layers)
    none = replace(step, last_rows_S=step.last_rows_S[:0])
    assert both.shape == (2, model.vocab_size)
    assert model.forward(none, store.layers).shape == (0, model.vocab_size)


def test_every_layer_writes_its_own_pages(model, store: PageStore) -> None:
    step = build_step([rows(store, [1, 2, 3])])
    model.forward(step, store.layers)
    where = step.page_table_BP, step.kv_lens_B
    kept = [layer.library.gather(layer.cache, *where)[0] for layer in store.layers]
    assert all(rows_THD.abs().amin(dim=(1, 2)).gt(0).all() for rows_THD in kept)
    assert not torch.equal(*kept)


def test_generate_of_transformers_is_refused(model) -> None:
    with pytest.raises(ArgumentError, match="outside a step"):
        model.module.generate(torch.tensor([[1, 2]]), max_new_tokens=2)


def test_a_static_cache_is_refused(model) -> None:
    from transformers import StaticCache

    cache = StaticCache(config=model.module.config, max_cache_len=16)
    with pytest.raises(ArgumentError, match="outside a step"):
        model.module(torch.tensor([[1, 2]]), **{model._cache_keyword: cache})


def test_a_static_cache_is_refused_within_a_step(model, store: PageStore) -> None:
    from transformers import StaticCache

    step = build_step([rows(store, [1, 2])])
    pages = adaptor.StepPages(step, store.layers)
    cache = StaticCache(config=model.module.config, max_cache_len=16)
    with pytest.raises(ArgumentError, match="outside a step"):
        model.module(
            step.tokens_T[None],
            position_ids=step.positions_T[None],
            kvgen_pages=pages,
            **{model._cache_keyword: cache},
        )


def test_a_padded_batch_is_refused(model, store: PageStore) -> None:
    pages = adaptor.StepPages(build_step([rows(store, [1, 2])]), store.layers)
    with pytest.raises(ArgumentError, match="one packed row of 2 tokens"):
        pages.receive(0, torch.zeros(2, 2, 2, 16), torch.zeros(2, 2, 2, 16))


@pytest.mark.parametrize(
    ("name", "value"), [("sliding_window", 8), ("softcap", 50.0), ("s_aux", torch.zeros(4))], ids=str
)
def test_attention_that_the_spec_does_not_describe_is_refused(
    model, store: PageStore, name: str, value: object
) -> None:
    pages = adaptor.StepPages(build_step([rows(store, [1, 2])]), store.layers)
    module = model.module.model.layers[1].self_attn
    with pytest.raises(UnsupportedError, match=f"LlamaAttention 1 wants {name} = .*, but its spec has None"):
        adaptor.attention(module, None, None, None, None, kvgen_pages=pages, **{name: value})
