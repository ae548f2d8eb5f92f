"""The specs of a model's pages: one for each layer, equal for layers of equal shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.errors import Diagnostic, SpecError
from kvgen.ir import Spec
from kvgen.models.presets import PAGES, check_pages
from kvgen.models.shape import LayerShape, ModelShape
from kvgen.passes.validate import load_spec

ModelSpecs = tuple[Spec, ...]
"""The spec of each layer of a model."""


def specs_for(shape: ModelShape, pages: str = "f32", *, page_size: int | None = None) -> ModelSpecs:
    """The specs of a model that computes in f32; ``pages`` is a key of ``PAGES``, and the specs' name.

    ``page_size``: the preset's by default. Raises ``SpecError`` for a shape that no kernel has.
    """
    made = {kind: spec_for(kind, pages, page_size=page_size) for kind in shape.kinds}
    return tuple(made[layer] for layer in shape.layers)


def spec_for(layer: LayerShape, pages: str = "f32", *, page_size: int | None = None) -> Spec:
    """The spec of one layer; see ``specs_for``."""
    check_pages(pages)
    preset = PAGES[pages]
    size = preset.page_size if page_size is None else page_size
    cache = {"page_size": size, "layout": "page kv head tok d", "k": preset.k, "v": preset.v, **preset.rest}
    return load_spec(
        {
            "name": pages,
            "attention": {"q_dtype": "f32", **_attention(layer)},
            "cache": cache | ({"v": {"alias": "k"}} if layer.latent else {}),
        }
    )


def specs_stored_like(
    spec: Spec, shape: ModelShape, rope: Mapping[str, Any] | None, q_dtype: str = "f32"
) -> ModelSpecs:
    """The cache and the arithmetic (``qk``, ``pv``) of ``spec`` for every layer of a model.

    Where ``spec`` keeps K unrotated the model's own ``rope`` (keys of [attention.rope]) takes the place of
    its own; everything else of its attention is the model's. ``q_dtype``: type of queries and of raw tokens.
    Raises ``SpecError`` where the model's rows do not suit the cache.
    """
    table = spec.to_dict()
    kept = {key: table["attention"][key] for key in ("qk", "pv")} | {"q_dtype": q_dtype}
    own = spec.attention.rope
    if own is not None and own.stored == "pre":
        if rope is None:
            reason = "the model rotates in a way of its own: K cannot be stored unrotated"
            raise SpecError([Diagnostic("attention.rope.stored", "pre", reason, "'post'")])
        kept["rope"] = {**rope, "stored": "pre"}
    wrong = [_alias(spec, layer) for layer in shape.kinds if spec.cache.alias != layer.latent]
    if wrong:
        raise SpecError(wrong[:1])
    made = {kind: load_spec(table | {"attention": kept | _attention(kind)}) for kind in shape.kinds}
    return tuple(made[layer] for layer in shape.layers)


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
    wrong += unknown_beforehand(spec)
    if wrong:
        raise SpecError(wrong)


def unknown_beforehand(spec: Spec) -> list[Diagnostic]:
    """What would have to be known of K and V before there is any (``models.calibrate`` finds it)."""
    found = []
    for side in spec.cache.fields:
        for part in spec.segments(side):
            if part.quant.static_scale:
                group, hint = dict(part.quant.group), "use { tok = 1, head = 1 }"
                found.append(Diagnostic(f"cache.{side}.group", group, f"its scales {KNOWN}", hint))
            if part.quant.outer is not None:
                outer = dict.fromkeys(part.quant.outer, 1)
                found.append(Diagnostic(f"cache.{side}.outer", outer, f"this scale {KNOWN}", "leave it out"))
    if spec.cache.k.mean:
        found.append(Diagnostic("cache.k.mean", True, f"the mean {KNOWN}", "leave it out"))
    return found


KNOWN = "would have to be known before the text is"


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
        wrong.append(_alias(spec, layer))
    return wrong


def _alias(spec: Spec, layer: LayerShape) -> Diagnostic:
    hint = 'write cache.v = { alias = "k" }' if layer.latent else "give V a format of its own"
    return Diagnostic("cache.v.alias", spec.cache.alias, f"the model has {layer.latent}", hint)
