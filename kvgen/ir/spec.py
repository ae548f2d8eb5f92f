"""Spec: one attention over one cache, with a canonical text and an identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields, replace
from functools import cached_property
from typing import Any

from kvgen.ir.attention import AttentionSpec, Param
from kvgen.ir.cache import PRESETS, CacheSpec
from kvgen.ir.layout import LayoutSpec
from kvgen.ir.meaning import meanings
from kvgen.ir.quant import QuantSpec, Segment, segments_of
from kvgen.ir.rope import RopeSpec


@dataclass(frozen=True)
class Spec:
    """What a user asks for. Equal specs (whatever their name) generate equal kernels."""

    name: str
    """A label for people; not part of the identity."""
    attention: AttentionSpec
    """What is computed."""
    cache: CacheSpec
    """How the cache lies in memory."""

    meanings: tuple[tuple[str, str], ...] = dataclasses.field(init=False)
    """(name, sha256) of what the registered names in it stood for when it was made, kvgen's own left out."""
    carried: InitVar[Mapping[str, str] | None] = None
    """``meanings`` as an export holds them, for a process that may not know the names."""

    def __post_init__(self, carried: Mapping[str, str] | None) -> None:
        found = meanings(self.attention, self.cache) if carried is None else tuple(sorted(carried.items()))
        object.__setattr__(self, "meanings", found)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``kvgen.load_spec`` reads back into an equal spec."""
        return {"name": self.name, "attention": _plain(self.attention), "cache": _plain(self.cache)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], carried: Mapping[str, str] | None = None) -> Spec:
        """The inverse of ``to_dict``; what people write is for ``kvgen.load_spec``, which checks it."""
        cache = dict(values["cache"])
        if cache["v"] == ALIAS:
            cache |= {"v": cache["k"], "alias": True}
        cache |= {side: _quant(cache[side]) for side in ("k", "v")}
        if cache["layout"] in PRESETS:
            cache["preset"] = cache["layout"]
            cache["layout"] = PRESETS[cache["preset"]]
        cache["layout"] = LayoutSpec.parse(cache["layout"])
        return cls(values["name"], _attention(values["attention"]), CacheSpec(**cache), carried)

    def canonical(self) -> str:
        """Canonical JSON: sorted keys, no spaces, no name; and what registered names mean."""
        body = {key: value for key, value in self.to_dict().items() if key != "name"}
        if self.meanings:
            body["meanings"] = dict(self.meanings)
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @cached_property
    def hash(self) -> str:
        """sha256 of the canonical JSON, as hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def segments(self, side: str) -> tuple[Segment, ...]:
        """The runs of d in which rows of ``"k"`` or ``"v"`` are stored: one, unless the spec cuts them.

        Of a V that is a part of K: the runs of K that hold it, the last one cut to it.
        """
        att, quant = self.attention, self.cache.quant(side)
        if side == "k" or not self.cache.alias:
            return segments_of(side, att.head_dim if side == "k" else att.v_head_dim, quant)
        found = segments_of("k", att.head_dim, quant)
        return tuple(
            replace(part, size=min(part.size, att.v_head_dim - part.start))
            for part in found
            if part.start < att.v_head_dim
        )

    def given_scales(self) -> tuple[tuple[str, str, bool], ...]:
        """Scales that a caller gives, as (name, type, whether one a head): static ones, and outer ones."""
        found = []
        for field in self.cache.fields:
            for part in self.segments(field):
                quant = part.quant
                if quant.static_scale:
                    found.append((f"{part.plane}_scale", quant.scale_dtype, "head" in quant.scale_dims))
                if quant.outer is not None:
                    found.append((f"{part.plane}_outer", "f32", "head" in quant.outer))
        return tuple(found)

    def direct(self, side: str) -> bool:
        """Whether kernels read ``"k"`` or ``"v"`` through operands of its format's own, and no raw rows."""
        return self.cache.quant(side).direct and self.cache.raw is None

    @property
    def hash8(self) -> str:
        """First 8 digits of the identity: enough for file names and headers."""
        return self.hash[:8]


ALIAS = {"alias": "k"}
"""``[cache.v]`` of a spec whose V is a part of K."""


def freeze(value: Any) -> Any:
    """A value of a spec file as one that hashes: a table becomes sorted pairs."""
    return tuple(sorted((k, freeze(v)) for k, v in value.items())) if isinstance(value, Mapping) else value


def _thaw(value: Any) -> Any:
    return {k: _thaw(v) for k, v in value} if isinstance(value, tuple) else value


def _attention(values: Mapping[str, Any]) -> AttentionSpec:
    """An AttentionSpec from the values that ``_plain`` made of it."""
    own = {f.name: None for f in fields(AttentionSpec)}
    plain = own | {key: value for key, value in values.items() if key in own}
    options = {key: freeze(value) for key, value in values.items() if key not in own}
    params = {name: (tuple(p["dims"]), p["dtype"]) for name, p in values.get("params", {}).items()}
    rope = values.get("rope")
    plain |= {
        "options": tuple(sorted(options.items())),
        "params": tuple(Param(name, *params[name]) for name in sorted(params)),
        "rope": RopeSpec.from_dict(rope) if rope else None,
    }
    return AttentionSpec(**plain)


def _plain_quant(quant: QuantSpec) -> dict[str, Any]:
    """The keys of [cache.k]; those that say nothing new are left out."""
    body: dict[str, Any] = {"layout": str(quant.layout)} if quant.layout else {}
    if quant.segments:
        body["segments"] = [{"size": size, **_plain_quant(own)} for size, own in quant.segments]
    else:
        body["format"] = quant.format
    if not quant.segments and quant.fmt.scaled:
        body |= {"group": dict(quant.group), "scale_dtype": quant.scale_dtype}
    if quant.outer is not None:
        body["outer"] = dict.fromkeys(quant.outer, 1)
    if quant.levels:
        body |= {"levels": list(quant.levels), "measure": quant.measure}
    if quant.scales != "page":
        body["scales"] = quant.scales
    return body | {key: getattr(quant, key) for key in ("affine", "transform", "mean") if getattr(quant, key)}


def _quant(values: Mapping[str, Any]) -> QuantSpec:
    """A QuantSpec from the values that ``_plain_quant`` made of it."""
    found = dict(values)
    if "group" in found:
        found["group"] = tuple(sorted(found["group"].items()))
    if "layout" in found:
        found["layout"] = LayoutSpec.parse(found["layout"])
    if "outer" in found:
        found["outer"] = tuple(found["outer"])
    if "levels" in found:
        found["levels"] = tuple(found["levels"])
    if "segments" in found:
        own = ({**part} for part in found["segments"])
        found |= {"format": "f32", "segments": tuple((part.pop("size"), _quant(part)) for part in own)}
    return QuantSpec(**found)


def _plain(value: object) -> Any:
    """A dataclass of the IR as the values a TOML file would hold; None and unset keys are left out."""
    if isinstance(value, LayoutSpec):
        return str(value)
    if isinstance(value, QuantSpec):
        return _plain_quant(value)
    if isinstance(value, AttentionSpec | CacheSpec):
        pairs = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        if pairs.get("preset"):
            pairs["layout"] = pairs.pop("preset")
        if pairs.pop("alias", False):
            pairs["v"] = ALIAS
        for key in ("keep_first", "keep_last"):
            if pairs.get(key) == 0:
                del pairs[key]
        for key, item in pairs.pop("options", ()):
            pairs[key] = _thaw(item)
        pairs["params"] = {
            p.name: {"dims": list(p.dims), "dtype": p.dtype} for p in pairs.get("params", ())
        } or None
        return {key: item for key, item in pairs.items() if item is not None}
    return value.to_dict() if isinstance(value, RopeSpec) else value
