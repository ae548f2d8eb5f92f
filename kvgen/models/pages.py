"""The specs of a model's pages: one for each layer, equal for layers of equal shapes."""

from __future__ import annotations

from typing import Any

from kvgen.errors import ArgumentError, Diagnostic, SpecError
from kvgen.ir import Spec
from kvgen.models.shape import LayerShape, ModelShape
from kvgen.passes.validate import load_spec

PAGES: dict[str, dict[str, Any]] = {
    "f32": {"format": "f32"},
    "bf16": {"format": "bf16"},
    "int8": {"format": "int8", "group": {"tok": 1, "head": 1}},
}
"""Storage of K and V by the short name that commands take; int8 has a scale for each token and head."""

ModelSpecs = tuple[Spec, ...]
"""The spec of each layer of a model."""


def check_pages(pages: str) -> None:
    """Refuse what is no key of ``PAGES`` with an ``ArgumentError``, before any model is loaded for it."""
    if pages not in PAGES:
        raise ArgumentError(f"--pages {pages}: give one of {', '.join(PAGES)}")


def specs_for(shape: ModelShape, pages: str = "f32", *, page_size: int = 16) -> ModelSpecs:
    """The specs of a model that computes in f32; ``pages`` is a key of ``PAGES``, and the specs' name.

    Raises ``SpecError`` for a shape that no kernel has.
    """
    made = {kind: spec_for(kind, pages, page_size=page_size) for kind in shape.kinds}
    return tuple(made[layer] for layer in shape.layers)


def spec_for(layer: LayerShape, pages: str = "f32", *, page_size: int = 16) -> Spec:
    """The spec of one layer; see ``specs_for``."""
    check_pages(pages)
    cache = {"page_size": page_size, "layout": "page kv head tok d", "k": PAGES[pages], "v": PAGES[pages]}
    return load_spec(
        {
            "name": pages,
            "attention": {"q_dtype": "f32", **_attention(layer)},
            "cache": cache | ({"v": {"alias": "k"}} if layer.latent else {}),
        }
    )


def _attention(layer: LayerShape) -> dict[str, Any]:
    """The keys of a spec that a layer decides; those that are off are left out."""
    values = {
        "q_heads": layer.q_heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "v_head_dim": layer.v_head_dim,
        "scale": layer.scale,
        "window": layer.window,
        "soft_cap": layer.soft_cap,
        "sink_logit": layer.sink or None,
    }
    return {key: value for key, value in values.items() if value is not None}


def specs_like(spec: Spec, shape: ModelShape) -> ModelSpecs:
    """``spec`` for the layers that it describes, and its cache and arithmetic for the model's other layers.

    Raises ``SpecError`` with every field of ``spec`` that suits no layer of the model.
    """
    check_matches(spec, shape)
    table = spec.to_dict()
    decided = set(_attention(LayerShape(1, 1, 1, 1, 1.0, 1, 1.0, True)))
    free = {key: value for key, value in table["attention"].items() if key not in decided}
    made = {
        kind: spec if not _wrong(spec, kind) else load_spec(table | {"attention": free | _attention(kind)})
        for kind in shape.kinds
    }
    return tuple(made[layer] for layer in shape.layers)


def check_matches(spec: Spec, shape: ModelShape) -> None:
    """Raise ``SpecError`` with every field of ``spec`` that does not suit the nearest layer of the model."""
    wrong = min((_wrong(spec, kind) for kind in shape.kinds), key=len)
    for side in ("k", "v"):
        if spec.cache.quant(side).static_scale:
            group = dict(spec.cache.quant(side).group)
            reason = "its scales would have to be known before the text is"
            wrong.append(Diagnostic(f"cache.{side}.group", group, reason, "use { tok = 1, head = 1 }"))
    if wrong:
        raise SpecError(wrong)


def _wrong(spec: Spec, layer: LayerShape) -> list[Diagnostic]:
    """The fields in which ``spec`` differs from a layer."""
    att = spec.attention
    want = _attention(layer) | {"causal": True, "window": layer.window}
    have = {key: getattr(att, key) for key in want if hasattr(att, key)} | dict(att.options)
    reasons = {
        key: f"the model has {want[key]!r}" if key in want else "the model has none" for key in have | want
    }
    wrong = [
        Diagnostic(f"attention.{key}", have.get(key), reason)
        for key, reason in reasons.items()
        if have.get(key) != want.get(key)
    ]
    if att.rope is not None:
        wrong.append(
            Diagnostic("attention.rope", att.rope.kind, "the model's own code rotates; leave it out")
        )
    if spec.cache.alias != layer.latent:
        hint = 'write cache.v = { alias = "k" }' if layer.latent else "give V a format of its own"
        wrong.append(Diagnostic("cache.v.alias", spec.cache.alias, f"the model has {layer.latent}", hint))
    return wrong
