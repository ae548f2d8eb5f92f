"""why: whether tuning would find each op in the cache, and if not, which fields of the key made the miss.

Nothing is tuned or set aside: the wanted key is compared with the nearest stored record, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kvgen
from kvgen import bounded
from kvgen.ir import Spec, Target
from kvgen.tune import store
from kvgen.tune.device import device_name
from kvgen.tune.key import Key, key_of
from kvgen.tune.space import space_of, spec_facts
from kvgen.tune.tuner import Pins, check_request, effort_suffices

ABSENT = "absent"
"""Stands for a field that one side does not have."""


@dataclass(frozen=True)
class Difference:
    """One field of a key."""

    field: str
    """``cache.page_size``, ``pins.tile``, ``features``, ``templates``, ``space``, ``effort``, ..."""
    stored: Any
    wanted: Any

    def __str__(self) -> str:
        match self.field:
            case "templates":
                return f"the templates have changed ({self.stored} -> {self.wanted})"
            case "space":
                return f"the schedule space has changed ({self.stored} -> {self.wanted})"
            case "effort":
                return f"effort {self.wanted} is asked for, and {self.stored} was done"
            case _:
                return f"{self.field} is {_short(self.stored)} there and {_short(self.wanted)} here"


@dataclass(frozen=True)
class Reason:
    """What the cache says to one op."""

    op: str
    hit: bool
    file: str
    """Where the record is, or would be."""
    nearest: str
    """The stored record that is most like it; empty where there is none for this op."""
    differs: tuple[Difference, ...]
    """In what the nearest differs."""
    fault: str = ""
    """Why the nearest cannot be used though its key is the one wanted."""

    def __str__(self) -> str:
        if self.hit:
            return "every field agrees"
        if not self.nearest:
            return "no record of this op is stored"
        return self.fault or "; ".join(map(str, self.differs))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "op": self.op,
            "hit": self.hit,
            "file": self.file,
            "nearest": self.nearest or None,
            "differs": [vars(found) for found in self.differs],
            "fault": self.fault,
        }


def why(
    spec: Spec, target: Target, *, effort: str, ops: tuple[str, ...], pins: Pins, cache_dir: Path | None
) -> list[Reason]:
    """A reason for each op. Raises as ``tune`` does for what cannot be tuned."""
    check_request(target, effort, (*ops, *pins))
    return [_why(op, spec, target, effort, pins, cache_dir) for op in ops]


def _why(op: str, spec: Spec, target: Target, effort: str, pins: Pins, cache_dir: Path | None) -> Reason:
    space = space_of(op, target)
    key = key_of(op, spec, target, pins.get(op, {}), space)
    ways = list(store.folders(cache_dir))
    file = str(next((folder / key.file for folder, local in ways if local), key.file))
    near: tuple[int, str, tuple[Difference, ...], str] | None = None
    for folder, local in ways:
        for path in sorted(folder.glob(f"*/{op}__*.json")):
            # For a GPU what came with the package answers too: see the tuner.
            own = (local or target.backend != "cpu") and path == folder / key.file
            raw = _read(path)
            wanted = key
            if raw is not None and path == folder / key.file and raw.get("templates") != key.templates:
                found = store.read(path, key, space, spec_facts(spec, target), local=False)
                if found is not None and not found.stale:  # the templates have, this kernel has not changed
                    wanted = replace(key, templates=str(raw["templates"]))
            differs = () if raw is None else tuple(_differences(raw, wanted, effort, device_name(target)))
            fault = ""
            if own and not differs:
                fault = store.fault(path, key, space, spec_facts(spec, target))
                if not fault:
                    return Reason(op, True, file, str(path), ())
            elif raw is None or not (differs or fault):
                continue  # damaged and of another key; or the package's, which answers a build and not tune
            if near is None or len(differs) < near[0]:
                near = (len(differs), str(path), differs, fault)
    return Reason(op, False, file, *near[1:]) if near else Reason(op, False, file, "", ())


def _read(path: Path) -> dict[str, Any] | None:
    try:
        raw = bounded.read_json(path, store.MOST_BYTES)
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


def _differences(raw: Mapping[str, Any], key: Key, effort: str, device: str) -> Iterator[Difference]:
    wanted = key.identity() | {"templates": key.templates, "space": key.space}
    stored: dict[str, Any] = {name: raw.get(name, ABSENT) for name in wanted}
    for name in ("reads", "pins"):
        wanted |= _flat(wanted.pop(name), f"{name}.")
        stored |= _flat(stored.pop(name), f"{name}.")
    if raw.get("format") != store.FORMAT:
        yield Difference("format", raw.get("format", ABSENT), store.FORMAT)
    for name in dict.fromkeys((*wanted, *stored)):
        have, want = stored.get(name, ABSENT), wanted.get(name, ABSENT)
        if have != want:
            yield Difference(name.removeprefix("reads."), have, want)
            if name == "templates" and raw.get("kvgen") != kvgen.__version__:
                yield Difference("kvgen", raw.get("kvgen", ABSENT), kvgen.__version__)
    if not effort_suffices(str(raw.get("effort")), effort):
        yield Difference("effort", raw.get("effort", ABSENT), effort)
    if device and raw.get("device") != device:  # a GPU target has no device: what was measured on one holds
        yield Difference("device", raw.get("device", ABSENT), device)


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    """Nested objects as one, with dotted names."""
    if not isinstance(value, dict):
        return {prefix.rstrip("."): value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= (
            _flat(inner, f"{prefix}{name}.") if isinstance(inner, dict) and inner else {prefix + name: inner}
        )
    return found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text) if text == "" else text
