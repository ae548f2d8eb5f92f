"""Spec: one attention over one cache, with a canonical text and an identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvgen.ir.attention import AttentionSpec, Param
from kvgen.ir.cache import PRESETS, CacheSpec
from kvgen.ir.layout import LayoutSpec
from kvgen.ir.quant import QuantSpec
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``kvgen.load_spec`` reads back into an equal spec."""
        return {"name": self.name, "attention": _plain(self.attention), "cache": _plain(self.cache)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Spec:
        """The inverse of ``to_dict``; what people write is for ``kvgen.load_spec``, which checks it."""
        cache = dict(values["cache"])
        if cache["v"] == ALIAS:
            cache |= {"v": cache["k"], "alias": True}
        cache |= {side: _quant(cache[side]) for side in ("k", "v")}
        if cache["layout"] in PRESETS:
            cache["preset"] = cache["layout"]
            cache["layout"] = PRESETS[cache["preset"]]
        cache["layout"] = LayoutSpec.parse(cache["layout"])
        return cls(values["name"], _attention(values["attention"]), CacheSpec(**cache))

    def canonical(self) -> str:
        """Canonical JSON: sorted keys, no spaces, no name."""
        body = {key: value for key, value in self.to_dict().items() if key != "name"}
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @cached_property
    def hash(self) -> str:
        """sha256 of the canonical JSON, as hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

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


def _quant(values: Mapping[str, Any]) -> QuantSpec:
    """A QuantSpec from the values that ``_plain`` made of it."""
    found = dict(values)
    if "group" in found:
        found["group"] = tuple(sorted(found["group"].items()))
    if "layout" in found:
        found["layout"] = LayoutSpec.parse(found["layout"])
    return QuantSpec(**found)


def _plain(value: object) -> Any:
    """A dataclass of the IR as the values a TOML file would hold; None and unset keys are left out."""
    if isinstance(value, LayoutSpec):
        return str(value)
    if isinstance(value, QuantSpec):
        body = {"format": value.format}
        if value.fmt.scaled:
            body |= {"group": dict(value.group), "scale_dtype": value.scale_dtype}  # type: ignore[dict-item]
        return body | ({"layout": str(value.layout)} if value.layout else {})
    if isinstance(value, AttentionSpec | CacheSpec):
        pairs = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        if pairs.get("preset"):
            pairs["layout"] = pairs.pop("preset")
        if pairs.pop("alias", False):
            pairs["v"] = ALIAS
        for key, item in pairs.pop("options", ()):
            pairs[key] = _thaw(item)
        pairs["params"] = {
            p.name: {"dims": list(p.dims), "dtype": p.dtype} for p in pairs.get("params", ())
        } or None
        return {key: item for key, item in pairs.items() if item is not None}
    return value.to_dict() if isinstance(value, RopeSpec) else value
