"""kvgen run --print-spec: the spec of a model's pages as TOML, for build, tune, show and export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvgen.commands import output
from kvgen.commands.progress import progress
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.ir import Spec

TABLES = ("attention", "attention.params", "attention.rope", "cache", "cache.k", "cache.v")
"""What gets a header of its own in a spec's file; other tables stand on one line."""


def print_spec(
    model: str, pages: str | None, given: Spec | None, page_size: int | None, layer: int, as_json: bool
) -> None:
    """Print the spec that ``kvgen run`` uses for a layer of a model. Its weights are not loaded."""
    from kvgen.models.catalog import PACKAGED, find_model
    from kvgen.models.checkpoint import read_shape
    from kvgen.models.pages import specs_for
    from kvgen.models.session import specs_of

    with progress(quiet=as_json) as advance:
        folder = find_model(model, lambda done, total: advance("converting weights", done, total, model))
    shape = read_shape(folder)
    if given is None:  # scales that a run would have to know beforehand may stand in a spec
        specs = specs_for(shape, pages or "f32", page_size=page_size)
    else:
        specs = specs_of(shape, pages, given, page_size)
    if layer >= len(specs):
        raise ArgumentError(f"--layer {layer}: the model has {len(specs)} layers; give 0 to {len(specs) - 1}")
    name = model if model in PACKAGED else folder.resolve().name
    kinds = list(dict.fromkeys(spec.hash for spec in specs))
    if given is None:
        tail = f"-{kinds.index(specs[layer].hash)}" if len(kinds) > 1 else ""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "model"
        specs = tuple(replace(spec, name=f"{plain}-{spec.name}{tail}") for spec in specs)
    if as_json:
        output.print_json({"model": name, "layer": layer, "spec": specs[layer].to_dict()})
        return
    for text in (*_comments(specs, layer, kinds), "", *toml_lines(specs[layer].to_dict())):
        print(text)


def _comments(specs: tuple[Spec, ...], layer: int, kinds: list[str]) -> Iterator[str]:
    """Which layers a spec is for, and where those of the others are."""
    if len(kinds) == 1:
        yield f"# For all {len(specs)} layers."
        return
    for kind in kinds:
        layers = [at for at, spec in enumerate(specs) if spec.hash == kind]
        names = (
            ", ".join(map(str, layers)) if len(layers) < 9 else f"{layers[0]}, {layers[1]} ... {layers[-1]}"
        )
        several = len(layers) > 1
        other = f" {'have' if several else 'has'} another: --print-spec --layer {layers[0]}"
        yield f"# Layer{'s' * several} {names}{other if kind != specs[layer].hash else ': this spec.'}"


def toml_lines(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A spec's dict as the lines of a TOML file."""
    inside = {key: f"{path}.{key}".lstrip(".") for key, value in table.items() if isinstance(value, Mapping)}
    headed = {key: name for key, name in inside.items() if name in TABLES}
    for key, value in table.items():
        if key not in headed:
            yield f"{key} = {toml_value(value)}"
    for key, name in headed.items():
        yield from ("", f"[{name}]", *toml_lines(table[key], name))


def toml_value(value: Any) -> str:
    """A value on one line of TOML."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, allow_nan=False)
