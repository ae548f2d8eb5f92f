"""kvgen list: what is registered. Works without compiler, GPU, torch and triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, spec_folders, toml_files
from kvgen.errors import ArgumentError, SpecError
from kvgen.names import LISTS, suggest

Rows = list[dict[str, Any]]

EXAMPLE_HEADS = 32
"""Query heads for which examples of definitions are spelt out."""


def run(
    what: Annotated[
        str,
        typer.Argument(metavar="[WHAT]", help="targets, formats, masks, scores, ...; all without."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List targets, formats, masks, score terms, position schemes, ops, specs and schedules."""
    what = LISTS.get(what, what)
    if what and what not in SECTIONS:
        meant = suggest(what, SECTIONS)
        hint = f"did you mean {meant}? There are" if meant else "there are"
        raise ArgumentError(f"list {what}: no such list; {hint} {', '.join(SECTIONS)}")
    found = {name: SECTIONS[name]() for name in ([what] if what else SECTIONS)}
    if as_json:
        output.print_json(found)
        return
    for name, rows in found.items():
        columns = list(rows[0]) if rows else []
        numbers = [c for c in columns if all(isinstance(row[c], int | None) for row in rows)]
        output.table(columns, [list(row.values()) for row in rows], title=name.capitalize(), right=numbers)
        if not rows:
            output.line("none here: write one, or see the examples folder of kvgen's sources")


def targets() -> Rows:
    """Registered targets with their facts; ``here``: whether this CPU runs its kernels."""
    from kvgen.backends.cpu import isa
    from kvgen.targets import TARGETS

    have = isa.cpu_features()
    best = isa.best_row().target
    rows: Rows = []
    for target in TARGETS.values():
        facts, here = [], ""
        if target.backend == "cpu":
            row = isa.ROWS[target.arch]
            facts = [f"{8 * row.vector_bytes}-bit vectors", *row.required]
            here = "yes" if have.issuperset(row.required) else "no"
            here = "yes, as cpu" if target.name == best else here
        elif target.interpreted:
            facts, here = ["Triton's interpreter: slow, needs no GPU"], "with triton"
        else:
            here = "with the GPU"
            facts = [
                f"{target.sms} units",
                f"{target.hbm_bytes_per_s / 1e12:.3g} TB/s",
                f"{target.clock_hz / 1e9:.3g} GHz",
                f"{target.smem_bytes // 1024} KB shared",
            ]
        rows.append(
            {"name": target.name, "backend": target.backend, "runs here": here, "facts": ", ".join(facts)}
        )
    return rows


def formats() -> Rows:
    """Registered number formats, each with keys of [cache.k] that show it, or that its name stands for."""
    from kvgen.commands.describe import toml_text
    from kvgen.ir.codec import CODECS

    rows: Rows = []
    for codec in CODECS.values():
        own = codec.keys or {"format": codec.name, **codec.example}
        rows.append(
            {
                "name": codec.name,
                "kind": codec.kind,
                "bits": codec.bits,
                "what": codec.doc,
                "[cache.k]": ", ".join(f"{key} = {toml_text(value)}" for key, value in own.items()),
                "from": codec.source,
            }
        )
    return rows


def masks() -> Rows:
    """Registered masks."""
    return _definitions("mask")


def scores() -> Rows:
    """Registered score terms, in the order in which they apply."""
    return _definitions("score")


def sinks() -> Rows:
    """Registered sinks: what takes weight and has no value."""
    return _definitions("sink")


def _definitions(kind: str) -> Rows:
    from kvgen.commands.describe import param_text, toml_text
    from kvgen.ir.spec import freeze
    from kvgen.variants import definitions

    rows: Rows = []
    for found in definitions(kind):
        formula = found.formula(freeze(found.example[found.name]), EXAMPLE_HEADS)
        rows.append(
            {
                "name": found.name,
                "what": found.doc,
                "example": ", ".join(f"{key} = {toml_text(value)}" for key, value in found.example.items()),
                "means": formula.text,
                "parameters": ", ".join(map(param_text, formula.params)),
                "from": found.source,
            }
        )
    return rows


def positions() -> Rows:
    """Registered schemes of rotary positions."""
    from kvgen.passes.fields import REQUIRED
    from kvgen.variants import positions

    return [
        {
            "name": found.name,
            "what": found.doc,
            "keys": ", ".join(
                name if field.default is REQUIRED else f"[{name}]" for name, field in found.fields.items()
            ),
            "from": found.source,
        }
        for found in positions().values()
    ]


def ops() -> Rows:
    """The ops of a cache and what they do."""
    from kvgen.ir.plan import OPS
    from kvgen.runtime.ops import CacheOps

    docs = {op: (getattr(CacheOps, op).__doc__ or "").partition("\n")[0] for op in OPS}
    return [{"name": op, "what": doc.replace("``", "")} for op, doc in docs.items()]


def specs() -> Rows:
    """The specs in this folder and among the examples."""
    from kvgen.passes.validate import load_spec

    rows: Rows = []
    for path in [path for folder in spec_folders(Path()) for path in toml_files(folder)]:
        try:
            spec = load_spec(path)
        except SpecError as error:
            if any(found.path.startswith("attention.") for found in error.diagnostics):
                rows.append(
                    {
                        "file": str(path),
                        "spec": None,
                        "layout": f"{len(error.diagnostics)} mistakes",
                        "K, V": "",
                    }
                )
            continue  # some other TOML file
        storage = f"{spec.cache.k.format}, {spec.cache.v.format}"
        rows.append(
            {
                "file": str(path),
                # A preset becomes a layout, and the spec another one, once the target is known.
                "spec": "" if spec.cache.preset else spec.hash8,
                "layout": spec.cache.preset or str(spec.cache.layout),
                "K, V": storage,
            }
        )
    return rows


def schedules() -> Rows:
    """Every knob of every template, its values in canonical order and the default of any target."""
    from importlib import resources

    from kvgen.tune.space import load_space

    names = sorted(f.name for f in resources.files("kvgen.schedules").iterdir() if f.name.endswith(".toml"))
    rows: Rows = []
    for name in names:
        space = load_space(name.removesuffix(".toml").replace("_", "/", 1))
        seed = space.seeds.get("any", {})
        for knob, values in space.knobs.items():
            fixed = "yes" if knob in space.numerics else ""
            rows.append(
                {
                    "template": space.template,
                    "knob": knob,
                    "values": " ".join(map(str, values)),
                    "default": str(seed.get(knob, "")),
                    "decides bits": fixed,
                }
            )
    return rows


SECTIONS: dict[str, Callable[[], Rows]] = {
    "targets": targets,
    "formats": formats,
    "masks": masks,
    "scores": scores,
    "sinks": sinks,
    "positions": positions,
    "ops": ops,
    "specs": specs,
    "schedules": schedules,
}
"""What can be listed."""
