"""meaning: what names that a user has registered stand for, so that the identity of a spec holds it.

Two codecs "mine" of different levels are different formats: kernels, caches and tuned winners of one are not
those of the other. Names that kvgen brings mean the same everywhere, and stand for themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from kvgen.ir.attention import AttentionSpec
from kvgen.ir.cache import CacheSpec
from kvgen.ir.codec import CODECS

OWN: dict[str, Callable[[Any, int], Any]] = {}
"""By the key of a mask, a score or a sink, or ``rope.`` and the kind of a scheme: (its value, q_heads) -> all
that it decides. Filled by ``kvgen.variants`` for definitions that are not kvgen's own."""


def meanings(attention: AttentionSpec, cache: CacheSpec) -> tuple[tuple[str, str], ...]:
    """(name, sha256 of what it means) for each registered name that a spec uses and kvgen does not bring."""
    quants = [cache.quant(side) for side in ("k", "v")]
    formats = {own.format for quant in quants for own in (quant, *(part for _, part in quant.segments))}
    found: dict[str, Any] = {
        f"format.{name}": CODECS[name].meaning()
        for name in formats
        if name in CODECS and not CODECS[name].built_in
    }
    for key, value in attention.options:
        if key in OWN:
            found[key] = OWN[key](value, attention.q_heads)
    rope = attention.rope
    if rope is not None and f"rope.{rope.kind}" in OWN:
        found[f"rope.{rope.kind}"] = OWN[f"rope.{rope.kind}"](rope, attention.q_heads)
    return tuple((name, _digest(content)) for name, content in sorted(found.items()))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """What json does not know: dataclasses and mappings as dictionaries, and callables by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else getattr(value, "__qualname__", str(value))
