"""committed: the winners that the source tree ships in ``autotune_cache/``, and whether they are fit for it.

Small and sorted, so that a change reads as one; of specs that stand in ``examples/``; a CPU's measured, with
its name; a GPU's predicted, or measured on one by ``kvgen bench --gpu-check``. A record of one CPU serves
another CPU of the same row: to a build as the best that is known, to the tuner as a starting point.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kvgen import bounded, paths
from kvgen.errors import ArgumentError
from kvgen.ir import Spec, Target
from kvgen.ir.plan import OPS
from kvgen.ir.schedule import Knob
from kvgen.passes.preset import resolve as resolve_preset
from kvgen.targets import TARGETS
from kvgen.tune import store
from kvgen.tune.key import Key, key_of
from kvgen.tune.space import Space, space_of, spec_facts

LARGEST = 16 * 1024
"""Most bytes of one record."""

PATH = re.compile(r"(?:^|[\s\"'=])(?:/|[A-Za-z]:\\|~/)\w")
"""A path of some machine inside a text."""

Known = tuple[Key, Space, Mapping[str, Knob]]


def source_folder() -> Path:
    """``autotune_cache/`` of the checkout that kvgen runs from; ``ArgumentError`` where it runs from none."""
    found = resources.files("kvgen.autotune_cache")
    folder = found.resolve() if isinstance(found, Path) else None
    if folder is None or not (folder.parent / "pyproject.toml").is_file():
        raise ArgumentError(
            "--commit: kvgen runs from an installed package; run it in a checkout of its source"
        )
    return folder


def commit(
    spec: Spec, target: Target, ops: Sequence[str], folder: Path, *, cache_dir: Path | None = None
) -> list[Path]:
    """Copy the winners of ``spec`` into ``folder``; ops that have none, or stale ones only, are left out."""
    spec = resolve_preset(spec, target)
    written = []
    for op in ops:
        space = space_of(op, target)
        key = key_of(op, spec, target, {}, space)
        found = store.find(key, space, spec_facts(spec, target), cache_dir=cache_dir)
        if found is None or found.stale or found.elsewhere:
            continue
        (folder / key.target).mkdir(parents=True, exist_ok=True)
        paths.write_atomic(folder / key.file, store.dump(found, key))
        written.append(folder / key.file)
    return written


def known_keys(specs: Sequence[Spec]) -> dict[str, Known]:
    """What a record may be about, by its path: every op of these specs on every target."""
    found: dict[str, Known] = {}
    for unresolved in specs:
        for target in TARGETS.values():
            if target.interpreted:
                continue
            spec = resolve_preset(unresolved, target)
            for op in OPS:
                space = space_of(op, target)
                key = key_of(op, spec, target, {}, space)
                found[key.file] = (key, space, spec_facts(spec, target))
    return found


def records(folder: Path) -> list[Path]:
    """The records below a folder, in order of their names."""
    return sorted(folder.rglob("*.json"))


def problems(folder: Path, specs: Sequence[Spec]) -> Iterator[str]:
    """What is wrong with the records of a folder, a line each. That one is stale is not wrong."""
    known = known_keys(specs)
    for path in records(folder):
        name = path.relative_to(folder).as_posix()
        if name not in known:
            yield f"{name}: no spec of examples/ has an op with this key on this target; remove it"
            continue
        yield from (f"{name}: {words}" for words in _problems(path, *known[name]))


def stale(folder: Path, specs: Sequence[Spec]) -> list[str]:
    """Names of the records whose templates or schedule spaces have changed since."""
    known = known_keys(specs)
    names = [path.relative_to(folder).as_posix() for path in records(folder)]
    return [
        name
        for name in names
        if name in known
        and (found := store.read(folder / name, *known[name], local=False)) is not None
        and found.stale
    ]


def _problems(path: Path, key: Key, space: Space, facts: Mapping[str, Knob]) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        raw = bounded.parse_json(text)
        key = dataclasses.replace(key, features=tuple(raw["features"]))
    except (ValueError, KeyError, TypeError) as error:
        yield f"is no tuning record ({type(error).__name__})"
        return
    if fault := store.fault(path, key, space, facts):
        yield fault
        return
    if text != json.dumps(raw, indent=1, sort_keys=True) + "\n":
        yield "is not written as kvgen tune --commit writes it (sorted, indented by one)"
    if len(text) > LARGEST:
        yield f"has {len(text)} bytes; a record has a few thousand"
    if found := [value for value in _texts(raw) if PATH.search(value)]:
        yield f"holds a path of some machine: {found[0]}"
    if (raw["how"] == "measured") != bool(raw["device"]):
        yield f"is {raw['how']} on {raw['device'] or 'no device'}: only what is measured names its device"
    if key.target.startswith("cpu-") and raw["how"] != "measured":
        yield f"is {raw['how']}: a CPU's schedules are measured"


def _texts(value: Any) -> Iterator[str]:
    """Every text inside plain JSON data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
