"""The key of tuned winners: all they depend on, field by field, so that a miss can be explained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from typing import Any

from kvgen.ir import Schedule, Spec, Target
from kvgen.ir.schedule import Knob
from kvgen.tune.source_digest import source_digest
from kvgen.tune.space import Space


@dataclass(frozen=True)
class Key:
    """What winners depend on."""

    op: str
    target: str
    features: tuple[str, ...]
    reads: Mapping[str, Any]
    """The part of the spec that the op reads."""
    pins: Mapping[str, Knob]
    """Knobs that were pinned; empty for most."""
    templates: str
    """Digest of the op's templates."""
    space: str
    """Digest of the knobs, constraints and numerics of the op's schedule file."""
    source: Callable[[Schedule], str] | None = field(default=None, compare=False, repr=False)
    """Digest of the rendered sources under a schedule: an edit of the templates may leave it as it was."""

    @property
    def spec8(self) -> str:
        """First 8 digits of the hash of what the op reads (and of the pins, where there are any)."""
        parts: dict[str, Any] = {"reads": self.reads}
        if self.pins:
            parts["pins"] = dict(self.pins)
        return hashlib.sha256(_canonical(parts)).hexdigest()[:8]

    @property
    def stem(self) -> str:
        """``decode__1a2b3c4d``: what the names of its files begin with."""
        return f"{self.op}__{self.spec8}"

    @property
    def file(self) -> str:
        """The path of the winners below a tuning folder."""
        return f"{self.target}/{self.stem}.json"

    def identity(self) -> dict[str, Any]:
        """The fields that decide which file is meant, as plain JSON data: they stand in it in clear."""
        return {
            "op": self.op,
            "target": self.target,
            "features": list(self.features),
            "reads": dict(self.reads),
            "pins": dict(self.pins),
        }


ATTENTION = ("decode", "prefill")


def key_of(op: str, spec: Spec, target: Target, pins: Mapping[str, Knob], space: Space) -> Key:
    """The key of ``op`` for a spec and a target."""
    folder = space.template.split("/", maxsplit=1)[0]
    digests = _templates_digest(folder, op), space_digest(space)
    source = partial(source_digest, op, spec, target)
    return Key(op, target.name, target.features, read_by(op, spec), dict(pins), *digests, source)


def read_by(op: str, spec: Spec) -> dict[str, Any]:
    """What an op's kernel depends on. The scale of the scores is an argument of every launch."""
    plain = spec.to_dict()
    att: dict[str, Any] = {name: value for name, value in plain["attention"].items() if name != "scale"}
    sizes = {name: att[name] for name in ("kv_heads", "head_dim", "v_head_dim")}
    # What registered names mean: formats for all that reads a cache, the rest for attention.
    own = {name: what for name, what in spec.meanings if op in ATTENTION or name.startswith("format.")}
    own |= {name: what for name, what in spec.meanings if op == "append" and name.startswith("rope.")}
    meant = {"meanings": own} if own else {}
    if op in ATTENTION:
        return {"attention": att, "cache": plain["cache"], **meant}
    if op == "merge":
        names = ("q_heads", "v_head_dim", "q_dtype", *(("sink_logit",) if "sink_logit" in att else ()))
        return {"attention": {name: att[name] for name in names}}
    if op == "copy":
        return {"attention": sizes, "cache": plain["cache"], **meant}
    if op == "append" and "rope" in att:
        sizes["rope"] = att["rope"]
    return {"attention": {**sizes, "q_dtype": att["q_dtype"]}, "cache": plain["cache"], **meant}


@cache
def _templates_digest(folder: str, op: str) -> str:
    digest = hashlib.sha256()
    root = resources.files("kvgen.templates") / folder
    for item in sorted(root.iterdir(), key=lambda entry: entry.name):
        shared = item.name.startswith("_") and item.name.endswith(".jinja")
        if shared or item.name.split(".")[0] == op:
            digest.update(item.name.encode() + b"\0" + item.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def space_digest(space: Space) -> str:
    """Of what decides which schedules there are. Seeds and efforts only say where to look first."""
    knobs = {name: list(values) for name, values in space.knobs.items()}
    return hashlib.sha256(_canonical([knobs, space.constraints, space.numerics])).hexdigest()[:16]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
