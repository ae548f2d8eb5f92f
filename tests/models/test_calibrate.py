"""Scales and means that are given: what a text leaves in the pages, reduced by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.models.calibrate import Given, calibrate
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.pages import specs_for, specs_stored_like
from kvgen.passes.validate import load_spec
from tests.support.checkpoints import VOCABULARY, seeded

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint("gqa-tied"))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    with seeded(3):
        return torch.randint(VOCABULARY, (37,)).tolist()


@pytest.fixture(scope="module")
def rows(model, tokens) -> dict[str, torch.Tensor]:
    """K and V by transformers itself: (layers, kv_heads, tokens, d)."""
    from kvgen.models.bench import other_attention

    with other_attention(model.module, "eager") as module, torch.inference_mode():
        past = module(torch.tensor([tokens]), use_cache=True).past_key_values
    layers = range(model.num_layers)
    return {
        "k": torch.stack([past.layers[at].keys[0] for at in layers]),
        "v": torch.stack([past.layers[at].values[0] for at in layers]),
    }


def given(model, tokens, k: dict[str, Any], v: dict[str, Any]) -> Given:
    table = specs_for(model.shape)[0].to_dict()
    table["cache"] |= {"k": k, "v": v}
    return calibrate(model, specs_stored_like(load_spec(table), model.shape, None), tokens)


def test_a_cache_that_needs_nothing(model, tokens) -> None:
    side = {"format": "int8"}
    assert given(model, tokens, side, side) == Given(None, None)


def test_static_and_outer_scales(model, tokens, rows) -> None:
    nvfp4 = {"format": "e2m1", "scale_dtype": "e4m3", "outer": {}}
    found = given(model, tokens, {"format": "int8", "group": {"head": 1}}, nvfp4)
    assert found.means is None and found.scales is not None
    assert found.scales["k"].shape == (2, 2) and found.scales["v"].shape == (2, 1)
    torch.testing.assert_close(found.scales["k"], rows["k"].abs().amax((2, 3)) / 127, rtol=1e-4, atol=0)
    largest = rows["v"].abs().amax((1, 2, 3))[:, None]
    torch.testing.assert_close(found.scales["v"], largest / (6 * 448), rtol=1e-4, atol=0)


def test_a_mean_and_the_scale_of_what_is_left_when_rotated(model, tokens, rows) -> None:
    k = {"format": "e4m3", "group": {}, "mean": True, "transform": "hadamard"}
    found = given(model, tokens, k, {"format": "f32"})
    mean = rows["k"].mean(2)
    assert found.means is not None and found.scales is not None
    torch.testing.assert_close(found.means["k"], mean, rtol=1e-3, atol=1e-4)
    # The rotation as a matrix: Sylvester's, which the butterflies make in another way.
    matrix = torch.ones(1, 1)
    while len(matrix) < 16:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    left = (rows["k"] - mean[:, :, None]) @ matrix / 4
    torch.testing.assert_close(
        found.scales["k"], left.abs().amax((1, 2, 3))[:, None] / 448, rtol=1e-3, atol=0
    )
