"""The specs of a model's pages: one for each layer, and which specs of a user's suit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgen.errors import ArgumentError, SpecError
from kvgen.models.pages import check_matches, spec_for, specs_for, specs_like, specs_stored_like
from kvgen.models.presets import PAGES
from kvgen.models.shape import LayerShape, ModelShape
from kvgen.passes.validate import load_spec

FULL = LayerShape(q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25)
SHAPE = ModelShape((FULL, FULL), vocab_size=97, max_positions=128)


def mixed(**changes: Any) -> ModelShape:
    """Two layers, of which the second differs."""
    return ModelShape((FULL, replace(FULL, **changes)), vocab_size=97, max_positions=128)


WIDE = ModelShape((replace(FULL, head_dim=64, v_head_dim=64),), vocab_size=97, max_positions=128)


@pytest.mark.parametrize("pages", ["f32", "bf16", "int8"])
def test_the_specs_of_a_model(pages: str) -> None:
    spec, other = specs_for(SHAPE, pages, page_size=8)
    assert spec is other
    assert (spec.attention.q_heads, spec.attention.kv_heads, spec.attention.head_dim) == (4, 2, 16)
    assert (spec.cache.page_size, spec.cache.k.format, spec.cache.v.format) == (8, pages, pages)
    check_matches(spec, SHAPE)
    if pages == "int8":
        assert spec.cache.k.scale_dims == ("head", "tok")


@pytest.mark.parametrize("pages", PAGES)
def test_every_preset_is_a_spec(pages: str) -> None:
    (spec,) = specs_for(WIDE, pages)
    assert spec.cache.page_size == PAGES[pages].page_size
    assert PAGES[pages].doc
    if pages in ("int4", "int3", "int2"):
        assert (spec.cache.keep_first, spec.cache.keep_last) == (4, 32)
        assert (spec.cache.k.format, spec.cache.k.tok_block, spec.cache.v.d_block) == (pages, 32, 32)


def test_pages_that_do_not_exist() -> None:
    with pytest.raises(ArgumentError, match="f32, bf16, int8"):
        specs_for(SHAPE, "int5")


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


def test_an_outer_scale_and_a_mean_are_unknown_too() -> None:
    nvfp4 = spec_for(WIDE.layers[0], "nvfp4")
    with pytest.raises(SpecError, match=r"cache\.k\.outer = .*known before") as caught:
        check_matches(nvfp4, WIDE)
    assert [found.path for found in caught.value.diagnostics] == ["cache.k.outer", "cache.v.outer"]
    table = spec_for(FULL, "int8").to_dict()
    table["cache"]["k"]["mean"] = True
    with pytest.raises(SpecError, match=r"cache\.k\.mean = True: the mean would"):
        check_matches(load_spec(table), SHAPE)


def other_model(**attention: Any) -> dict[str, Any]:
    """A spec of another model's rows, whose cache suits any."""
    side = {"format": "int8"}
    table = {"q_heads": 8, "kv_heads": 1, "head_dim": 32, "window": 9, "q_dtype": "bf16", **attention}
    return {"name": "own", "attention": table, "cache": {"page_size": 8, "k": side, "v": side}}


def test_a_cache_for_another_model() -> None:
    spec = load_spec(other_model(qk="int8", rope={"theta": 5.0}))
    one, two = specs_stored_like(spec, mixed(window=7), None, "f16")
    assert (one.name, one.cache) == ("own", spec.cache)
    assert (one.attention.window, two.attention.window) == (None, 7)
    assert (one.attention.q_heads, one.attention.head_dim) == (4, 16)
    assert (one.attention.qk, one.attention.q_dtype, one.attention.rope) == ("int8", "f16", None)


def test_k_before_its_rotation_takes_the_models_angles() -> None:
    spec = load_spec(other_model(rope={"theta": 5.0, "stored": "pre"}))
    (made,) = {*specs_stored_like(spec, SHAPE, {"theta": 77.0, "pairing": "half"})}
    rope = made.attention.rope
    assert rope is not None and (rope.theta, rope.dim, rope.stored) == (77.0, 16, "pre")
    with pytest.raises(SpecError, match="rotates in a way of its own"):
        specs_stored_like(spec, SHAPE, None)


def test_a_cache_that_does_not_suit_the_model() -> None:
    table = other_model()
    table["cache"]["k"] = {"format": "int4", "group": {"tok": 1, "head": 1, "d": 16}}
    with pytest.raises(SpecError, match=r"cache\.k\.group\.d = 16"):
        specs_stored_like(load_spec(table), SHAPE, None)
    latent = ModelShape((LayerShape(4, 1, 48, 32, 0.25, latent=True),), 97, 128)
    with pytest.raises(SpecError, match=r'cache.v = \{ alias = "k" \}'):
        specs_stored_like(load_spec(other_model()), latent, None)
