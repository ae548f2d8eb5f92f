"""kvgen tune: generate the kernels of a spec, prove them, time their schedules, and keep the winners."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.commands import output
from kvgen.commands.options import (
    AsJson,
    OpNames,
    Pins,
    TargetName,
    chosen_ops,
    read_pins,
    read_spec,
)
from kvgen.commands.progress import progress
from kvgen.commands.tune_report import duration, print_report
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.ir import Spec
    from kvgen.ir.schedule import Knob
    from kvgen.tune.outcome import Step, TuneReport

EFFORTS = ("quick", "full")
SpecPaths = Annotated[list[str], typer.Argument(metavar="SPEC...", help="TOML files that describe caches.")]


def run(
    spec: SpecPaths,
    target: TargetName = "cpu",
    effort: Annotated[
        str, typer.Option("--effort", envvar="KVGEN_AUTOTUNE_EFFORT", help="quick (a minute or two) or full.")
    ] = "quick",
    op: OpNames = None,
    pin: Pins = None,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", metavar="DIR", help="Where winners are kept.")
    ] = None,
    why: Annotated[
        bool,
        typer.Option("--why", help="Tune nothing; say which ops the cache holds, and why not the others."),
    ] = False,
    commit: Annotated[
        bool,
        typer.Option(
            "--commit", help="In a checkout: put the winners into autotune_cache/ too, for a commit."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate, prove and tune the kernels; keep the winners.

    Every candidate that is timed has been compared with the float64 oracle first. Targets whose device is
    not here are ranked by a model over the compiled binaries, and marked "predicted". kvgen.build uses the
    winners from then on. An op that was finished before is not done again; of one that was interrupted, what
    its log holds is not.
    """
    if effort not in EFFORTS:
        raise ArgumentError(f"--effort {effort}: give one of {', '.join(EFFORTS)}")
    ops, pins = chosen_ops(op), read_pins(pin)
    loaded = [read_spec(path) for path in spec]
    if why:
        for one in loaded:
            explain(one, target, effort, ops, pins, cache_dir, as_json)
        return
    folder = _committed_to(pins, cache_dir) if commit else None
    for one in loaded:
        _tune(one, target, effort, ops, pins, cache_dir, folder, as_json)
    if folder is not None and not as_json:
        _judge(folder, loaded)


def _tune(
    loaded: Spec,
    target: str,
    effort: str,
    ops: tuple[str, ...],
    pins: dict[str, dict[str, Knob]],
    cache_dir: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Tune one spec and print its report; ``folder``: where its winners go for a commit."""
    from kvgen.tune.telling import STAGES
    from kvgen.tune.tuner import tune

    with progress(quiet=as_json) as advance:

        def told(step: Step) -> None:
            done, total = (1, 1) if step.stage == "done" else (step.done, step.total)
            advance(f"{step.op}: {STAGES[step.stage]}", done, total, _best(step))

        report = tune(loaded, target, effort=effort, ops=ops, pins=pins, progress=told, cache_dir=cache_dir)
    stored = _folder(cache_dir, report)
    written = _commit(loaded, target, ops, folder) if folder is not None else []
    if as_json:
        extra = {"committed": [path.name for path in written]} if folder is not None else {}
        output.print_json(report.to_dict() | {"stored": str(stored) if stored else None} | extra)
        return
    print_report(report)
    option = "KVGEN_CACHE_DIR" if cache_dir is None else "--cache-dir"
    lost = f"Winners were not kept: there is no folder for them; set {option} to a writable one"
    output.line(f"Winners are kept in {stored}" if stored else lost)
    if folder is not None:
        output.line(f"To commit: {len(written)} records of {report.target} in {folder}")


def _committed_to(pins: dict[str, dict[str, Knob]], cache_dir: Path | None) -> Path:
    """The folder of committed winners; refused where these would not be everybody's."""
    from kvgen.tune.committed import source_folder

    if pins or cache_dir is not None:
        option = "--pin" if pins else "--cache-dir"
        raise ArgumentError(f"{option}: not with --commit, whose records are those of an ordinary run")
    return source_folder()


def _commit(spec: Spec, target: str, ops: tuple[str, ...], folder: Path) -> list[Path]:
    from kvgen.resolve import resolve_target
    from kvgen.tune.committed import commit

    return commit(spec, resolve_target(target), ops, folder)


def _judge(folder: Path, specs: list[Spec]) -> None:
    """Say which committed records are stale, and what is wrong with others."""
    from kvgen.commands.options import spec_folders, toml_files
    from kvgen.passes.validate import load_spec
    from kvgen.tune.committed import problems, stale

    examples = [
        load_spec(path) for base in spec_folders(folder.parent / "examples") for path in toml_files(base)
    ]
    for text in problems(folder, [*examples, *specs]):
        output.line(f"wrong: {text}")
    for name in stale(folder, [*examples, *specs]):
        output.line(f"stale: {name} (the templates or the space have changed since): tune its spec again")


def explain(
    spec: Spec,
    target: str,
    effort: str,
    ops: tuple[str, ...],
    pins: dict[str, dict[str, Knob]],
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Print which ops are hits, and what made each miss."""
    from kvgen.resolve import resolve_target
    from kvgen.tune.why import why

    resolved = resolve_target(target)
    reasons = why(spec, resolved, effort=effort, ops=ops, pins=pins, cache_dir=cache_dir)
    if as_json:
        head = {"spec": spec.name, "spec_hash": spec.hash, "target": resolved.name, "effort": effort}
        output.print_json(head | {"ops": [reason.to_dict() for reason in reasons]})
        return
    rows = [(reason.op, "hit" if reason.hit else "miss", str(reason)) for reason in reasons]
    title = f"{spec.name} ({spec.hash8}) on {resolved.name}, {effort}"
    output.table(("op", "cache", "because"), rows, title=title)
    if near := [reason for reason in reasons if reason.nearest and not reason.hit]:
        output.line()
        for reason in near:
            output.line(f"{reason.op} was compared with {reason.nearest}")


def _folder(cache_dir: Path | None, report: TuneReport) -> Path | None:
    """Where ``kvgen.tune.store`` keeps winners; None where that is gone when this process ends."""
    from kvgen import paths

    base = paths.subfolder("tune") if cache_dir is None else paths.writable(cache_dir)
    folder = paths.writable(base / report.target)
    return None if paths.is_temporary(folder) else folder


def _best(step: Step) -> str:
    if step.best_s is None:
        return ""
    default = f", default {duration(step.default_s)}" if step.default_s else ""
    return f"best {duration(step.best_s)}{default}"
