"""What pages in fewer bits cost: the figures against their definitions, and their order."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from kvgen.errors import ArgumentError
from kvgen.models import quality
from kvgen.models.bench import other_attention
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.pages import specs_for, specs_stored_like
from kvgen.models.quality import default_text, measure
from kvgen.models.rotation import model_rope
from kvgen.models.shape import LayerShape, ModelShape
from kvgen.passes.validate import load_spec
from tests.support.checkpoints import VOCABULARY, seeded

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint("gqa-tied"))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    with seeded(2):
        return torch.randint(VOCABULARY, (90,)).tolist()


def test_fewer_bits_cost_more(model, tokens) -> None:
    specs = [specs_for(model.shape, pages) for pages in ("f32", "bf16", "int8")]
    report = measure(model, tokens, specs[0], specs, context=40, name="tiny")
    same, bf16, int8 = report.rows
    assert (same.kl_nats, same.kl_largest, same.top1_agreement) == (0, 0, 1)
    assert same.perplexity == report.perplexity
    assert 0 < bf16.kl_nats < int8.kl_nats < 0.1
    assert bf16.kl_nats < bf16.kl_largest and int8.top1_agreement > 0.9
    assert (report.model, report.tokens, report.context) == ("tiny", 90, 40)
    # Rows of 16 elements; int8 has a scale of 4 bytes for each. 40 tokens have pages for 48.
    assert [row.bits for row in report.rows] == [32, 16, 10]
    assert [row.bits_at_context for row in report.rows] == [32 * 1.2, 16 * 1.2, 10 * 1.2]


def test_chunks_and_neighbours_change_nothing_without_raw_tokens(model, tokens) -> None:
    """Contexts side by side, the last one shorter, in chunks that end beside page ends."""
    reference, int8 = (specs_for(model.shape, pages) for pages in ("f32", "int8"))
    whole = measure(model, tokens, reference, [int8], context=40)
    for chunk in (7, 13):
        report = measure(model, tokens, reference, [int8], context=40, chunk=chunk)
        assert (report.chunk, report.tokens) == (chunk, 90)
        assert report.perplexity == pytest.approx(whole.perplexity, rel=1e-5)
        assert report.rows[0].kl_nats == pytest.approx(whole.rows[0].kl_nats, rel=0.02)


def test_the_perplexity_is_that_of_transformers(model, tokens) -> None:
    report = measure(model, tokens[:41], specs_for(model.shape), [], context=40)
    assert report.tokens == 40, "a last context of one token predicts nothing"
    with other_attention(model.module, "eager") as module, torch.inference_mode():
        logits = module(torch.tensor([tokens[:40]])).logits[0, :-1]
    loss = functional.cross_entropy(logits, torch.tensor(tokens[1:40]))
    assert report.perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_int8_costs_what_rounding_k_and_v_costs(model, tokens) -> None:
    """transformers' eager attention over rounded K and V: the kernels add little of their own."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    def attention(module, query, key, value, mask, **options):
        return eager_attention_forward(module, query, rounded(key), rounded(value), mask, **options)

    AttentionInterface.register("rounded", attention)
    AttentionMaskInterface.register("rounded", eager_mask)
    sums = quality._Sums()
    with torch.inference_mode():
        logits = []
        for kind in ("eager", "rounded"):
            with other_attention(model.module, kind) as module:
                logits.append(module(torch.tensor([tokens])).logits[0])
        quality._compare(*logits, sums)
    report = measure(model, tokens, specs_for(model.shape), [specs_for(model.shape, "int8")])
    assert report.rows[0].kl_nats == pytest.approx(sums.kl / len(tokens), rel=0.2)


def test_the_figures_of_known_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    logits = {"f32": torch.log(p).repeat(4, 1), "bf16": torch.log(torch.stack([p, q, q, q]))}

    class Known:
        def __init__(self, model, specs, given, *, context, beside):
            self.name = specs[0].name

        def begin(self, requests):
            assert requests == 1

        def logits(self, parts):
            return logits[self.name]

        def bits(self, length=None):
            return 0.0

    monkeypatch.setattr(quality, "Runner", Known)
    monkeypatch.setattr(quality, "ROWS", 3)
    shape = ModelShape((LayerShape(1, 1, 16, 16, 0.25),), vocab_size=3, max_positions=8)
    specs = [specs_for(shape, pages) for pages in ("f32", "bf16")]
    report = measure(SimpleNamespace(max_positions=8), [0, 0, 1, 2], specs[0], specs[1:], context=4)
    (row,) = report.rows
    assert row.kl_nats == pytest.approx(3 / 4 * kl)
    assert row.kl_largest == pytest.approx(kl)
    assert row.top1_agreement == 1 / 4
    assert report.perplexity == pytest.approx((2 * 4 * 4) ** (1 / 3))
    assert row.perplexity == pytest.approx((2 * 2 * 4) ** (1 / 3))


@pytest.mark.parametrize("window", [1, 257])
def test_contexts_that_cannot_be(model, tokens, window: int) -> None:
    with pytest.raises(ArgumentError, match="2 to 256"):
        measure(model, tokens, specs_for(model.shape), [], context=window)


def test_the_context_of_a_short_model(model, tokens) -> None:
    assert measure(model, tokens[:3], specs_for(model.shape), []).context == 256


def test_a_chunk_of_nothing(model, tokens) -> None:
    with pytest.raises(ArgumentError, match="chunk = 0: give at least one"):
        measure(model, tokens, specs_for(model.shape), [], chunk=0)


def test_a_text_of_one_token(model) -> None:
    with pytest.raises(ArgumentError, match="at least 2"):
        measure(model, [1], specs_for(model.shape), [])


def test_there_is_a_text_with_every_python() -> None:
    assert len(default_text()) > 100_000


def test_k_before_its_rotation_is_the_same_k(model, tokens) -> None:
    """transformers' rotation undone, and done again by the kernels: prefill's and decode's."""
    rope = model_rope(model.module.config)
    assert rope is not None
    table = specs_for(model.shape)[0].to_dict()
    table["attention"]["rope"] = {"theta": 3.0, "stored": "pre"}
    spec = specs_stored_like(load_spec(table), model.shape, rope)
    assert spec[0].attention.rope.theta == model.module.config.rope_parameters["rope_theta"]
    for chunk in (None, 7):
        report = measure(model, tokens, specs_for(model.shape), [spec], context=40, chunk=chunk)
        assert report.rows[0].kl_largest < 1e-7 and report.rows[0].top1_agreement == 1
