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
    SpecPath,
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
STAGES = {
    "prove": "compile and check",
    "race": "race",
    "final": "compare the finalists with the default",
    "done": "done",
}
"""Words for the stages of an op."""


def run(
    spec: SpecPath,
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
    loaded = read_spec(spec)
    if why:
        explain(loaded, target, effort, ops, pins, cache_dir, as_json)
        return
    from kvgen.tune.tuner import tune

    with progress(quiet=as_json) as advance:

        def told(step: Step) -> None:
            done, total = (1, 1) if step.stage == "done" else (step.done, step.total)
            advance(f"{step.op}: {STAGES[step.stage]}", done, total, _best(step))

        report = tune(loaded, target, effort=effort, ops=ops, pins=pins, progress=told, cache_dir=cache_dir)
    stored = _folder(cache_dir, report)
    if as_json:
        output.print_json(report.to_dict() | {"stored": str(stored) if stored else None})
        return
    print_report(report)
    option = "KVGEN_CACHE_DIR" if cache_dir is None else "--cache-dir"
    lost = f"Winners were not kept: there is no folder for them; set {option} to a writable one"
    output.line(f"Winners are kept in {stored}" if stored else lost)


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
