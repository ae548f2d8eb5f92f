"""Every family of models: greedy tokens on pages are eager's, however batched, and each feature tells."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.models import latent
from kvgen.models.bench import other_attention
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.families import FAMILIES
from kvgen.models.pages import specs_for
from kvgen.runtime.engine import Engine
from tests.support.checkpoints import FAMILY_SHAPES, VOCABULARY, make_checkpoint, seeded
from tests.support.engines import library
from tests.support.tiny_engine import poison

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

NEW = 12
LENGTHS = (1, 2, 7, 8, 9, 17, 40)
"""Of the prompts: around a window of 8 and pages of 4."""


def prompts() -> list[list[int]]:
    with seeded(1):
        return [torch.randint(VOCABULARY, (n,)).tolist() for n in LENGTHS]


def eager(module: Any, **options: Any) -> list[list[int]]:
    made = []
    with other_attention(module, "eager"), torch.inference_mode():
        for prompt in prompts():
            found = module.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **options)
            made.append(found[0, len(prompt) :].tolist())
    return made


@pytest.mark.parametrize("family", FAMILY_SHAPES)
def test_greedy_tokens_are_those_of_eager(checkpoint: Any, family: str) -> None:
    model = load_model(checkpoint(family))
    want = eager(model.module)
    assert len({tuple(tokens) for tokens in want}) == len(want), "these prompts tell nothing apart"
    libraries = [library("portable", spec) for spec in specs_for(model.shape, page_size=4)]
    # A small chunk cuts prompts into pieces, and puts prefill and decode into the same step.
    engine = Engine(model, libraries, num_pages=128, max_batch=4, chunk=20)
    poison(engine.layers)
    assert engine.generate(prompts(), max_new_tokens=NEW) == want
    # With too few pages for all, some give theirs up and compute anew.
    engine = Engine(model, libraries, num_pages=16, max_batch=7, chunk=64)
    assert engine.generate(prompts(), max_new_tokens=NEW) == want


def test_a_window_of_one_key_sees_that_key(tmp_path: Path) -> None:
    """``sliding_window = 1`` is the token's own key; a window of 0 earlier keys is not "no window"."""
    shape = FAMILY_SHAPES["mistral"] | {"sliding_window": 1}
    model = load_model(make_checkpoint(tmp_path, family="mistral", **shape))
    assert [layer.window for layer in model.shape.layers] == [0, 0]
    libraries = [library("portable", spec) for spec in specs_for(model.shape, page_size=4)]
    engine = Engine(model, libraries, num_pages=128, max_batch=4, chunk=20)
    poison(engine.layers)
    assert engine.generate(prompts(), max_new_tokens=NEW) == eager(
        model.module,
        use_cache=False,  # transformers' own cache keeps all keys instead of none for such a window
    )


def without_window(module: Any) -> None:
    module.config.sliding_window = 1000


def without_cap(module: Any) -> None:
    for layer in module.model.layers:
        layer.self_attn.attn_logit_softcapping = None


def without_sinks(module: Any) -> None:
    for layer in module.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)


def without_scale(module: Any) -> None:
    for layer in module.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5


@pytest.mark.parametrize(
    ("family", "remove"),
    [
        ("mistral", without_window),
        ("gemma2", without_window),
        ("gemma2", without_cap),
        ("gemma2", without_scale),
        ("gemma3_text", without_window),
        ("gpt_oss", without_window),
        ("gpt_oss", without_sinks),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_each_feature_changes_the_tokens(checkpoint: Any, family: str, remove: Callable[[Any], None]) -> None:
    """Otherwise the test above would pass without it."""
    module = load_model(checkpoint(family)).module
    changed = copy.deepcopy(module)
    remove(changed)
    assert eager(changed) != eager(module)


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILY_SHAPES) | {"llama"} == set(FAMILIES)


def test_layers_of_a_hybrid_model_share_libraries_by_kind(checkpoint: Any) -> None:
    shape = load_model(checkpoint("gemma3_text")).shape
    windows = [layer.window for layer in shape.layers]
    assert windows == [7, None, 7] and len(shape.kinds) == 2


def test_latents_are_cached_and_nothing_is_written_out(checkpoint: Any) -> None:
    shape = load_model(checkpoint("deepseek_v3")).shape
    (spec,) = set(specs_for(shape, page_size=4))
    assert spec.cache.alias and (spec.attention.kv_heads, spec.attention.head_dim) == (1, 48)
    lib = library("portable", spec)
    assert lib.record.page_bytes() == 4 * 48 * 4, "one row of latent and rotated part a token"


def test_absorbed_attention_is_attention_over_expanded_rows(checkpoint: Any) -> None:
    module = load_model(checkpoint("deepseek_v3")).module.model.layers[0].self_attn
    g = torch.Generator().manual_seed(0)
    q_THD = torch.randn(3, 4, module.qk_head_dim, generator=g)
    latent_1HTD, rotated_1HTD = (torch.randn(1, 1, 5, n, generator=g) for n in (32, 16))
    key, value = (x[0].double() for x in module.expand_kv(latent_1HTD, rotated_1HTD))
    scores = torch.einsum("thd,hsd->hts", q_THD.double(), key)
    want = torch.einsum("hts,hsd->thd", scores.softmax(-1), value)
    rows = latent.latent_row(latent_1HTD, rotated_1HTD)[:, 0]
    absorbed = torch.einsum("thd,sd->hts", latent.absorb(module, q_THD), rows)
    torch.testing.assert_close(absorbed.double(), scores, rtol=0, atol=1e-4)
    sums = torch.einsum("hts,sc->thc", absorbed.softmax(-1), rows[:, :32])
    torch.testing.assert_close(latent.expand(module, sums).double(), want, rtol=0, atol=1e-4)
