"""The specs of a model's pages: one for each layer, and which specs of a user's suit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgen.errors import ArgumentError, SpecError
from kvgen.models.pages import PAGES, check_matches, spec_for, specs_for, specs_like
from kvgen.models.shape import LayerShape, ModelShape
from kvgen.passes.validate import load_spec

FULL = LayerShape(q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25)
SHAPE = ModelShape((FULL, FULL), vocab_size=97, max_positions=128)


def mixed(**changes: Any) -> ModelShape:
    """Two layers, of which the second differs."""
    return ModelShape((FULL, replace(FULL, **changes)), vocab_size=97, max_positions=128)


@pytest.mark.parametrize("pages", PAGES)
def test_the_specs_of_a_model(pages: str) -> None:
    spec, other = specs_for(SHAPE, pages, page_size=8)
    assert spec is other
    assert (spec.attention.q_heads, spec.attention.kv_heads, spec.attention.head_dim) == (4, 2, 16)
    assert (spec.cache.page_size, spec.cache.k.format, spec.cache.v.format) == (8, pages, pages)
    check_matches(spec, SHAPE)
    if pages == "int8":
        assert spec.cache.k.scale_dims == ("head", "tok")


def test_pages_that_do_not_exist() -> None:
    with pytest.raises(ArgumentError, match="f32, bf16, int8"):
        specs_for(SHAPE, "int4")


def test_heads_that_no_kernel_has() -> None:
    with pytest.raises(SpecError, match=r"attention\.head_dim = 12"):
        spec_for(replace(FULL, head_dim=12))


def test_a_spec_for_each_kind_of_layer() -> None:
    one, two = specs_for(mixed(window=7))
    assert (one.attention.window, two.attention.window) == (None, 7)
    assert one.cache == two.cache


def test_every_mismatch_of_a_spec_is_named() -> None:
    table = {"q_heads": 8, "kv_heads": 2, "head_dim": 16, "window": 5}
    cache = {"page_size": 8, "layout": "page kv head tok d", "k": {"format": "bf16"}, "v": {"format": "bf16"}}
    with pytest.raises(SpecError) as caught:
        check_matches(load_spec({"attention": table, "cache": cache}), SHAPE)
    assert [found.path for found in caught.value.diagnostics] == ["attention.q_heads", "attention.window"]
    assert "the model has 4" in str(caught.value)


def test_masks_and_scores_that_the_model_lacks_or_has() -> None:
    table = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "alibi": True, "rope": {"theta": 1e4}}
    cache = {"page_size": 8, "layout": "page kv head tok d", "k": {"format": "bf16"}, "v": {"format": "bf16"}}
    spec = load_spec({"attention": table, "cache": cache})
    with pytest.raises(SpecError) as caught:
        check_matches(spec, ModelShape((replace(FULL, soft_cap=5.0, sink=True),), 97, 128))
    assert sorted(found.path.removeprefix("attention.") for found in caught.value.diagnostics) == [
        "alibi",
        "rope",
        "sink_logit",
        "soft_cap",
    ]
    latent = LayerShape(4, 1, 48, 32, 0.25, latent=True)
    with pytest.raises(SpecError, match=r"cache\.v\.alias = False: the model has True; write cache.v"):
        check_matches(spec, ModelShape((latent,), 97, 128))
    made = spec_for(latent, "int8")
    assert made.cache.alias and made.cache.k.format == "int8"
    check_matches(made, ModelShape((latent,), 97, 128))


def test_a_spec_of_one_layer_gives_the_others_its_cache() -> None:
    table = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "window": 7, "q_dtype": "bf16"}
    cache = {"page_size": 8, "layout": "page kv tok head d", "k": {"format": "bf16"}, "v": {"format": "f16"}}
    spec = load_spec({"name": "own", "attention": table, "cache": cache})
    one, two = specs_like(spec, mixed(window=7))
    assert two is spec
    assert one.attention == replace(spec.attention, window=None)
    assert (one.name, one.cache) == (spec.name, spec.cache)


def test_scales_that_nobody_can_give() -> None:
    table = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
    int8 = {"format": "int8", "group": {"head": 1}}
    cache = {"page_size": 8, "layout": "page kv head tok d", "k": int8, "v": {"format": "bf16"}}
    with pytest.raises(SpecError, match=r"cache\.k\.group = .*known before") as caught:
        check_matches(load_spec({"attention": table, "cache": cache}), SHAPE)
    assert len(caught.value.diagnostics) == 1
