"""kvgen tune: generate the kernels of a spec, prove them, time their schedules, and keep the winners."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.ir import Schedule
    from kvgen.tune.outcome import OpReport, Step, TuneReport

EFFORTS = ("quick", "full")
UNITS = {1.0: "s", 1e-3: "ms", 1e-6: "us", 1e-9: "ns", 1e-12: "ps"}

PREDICTED = (
    "Predicted: ps per KV token and KV head (decode, prefill), per row or per element, from the compiled "
    "binaries and data-sheet figures. Nothing was run."
)


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
    as_json: AsJson = False,
) -> None:
    """Generate, prove and tune the kernels; keep the winners.

    Every candidate that is timed has been compared with the float64 oracle first. Targets whose device is
    not here are ranked by a model over the compiled binaries, and marked "predicted". kvgen.build uses the
    winners from then on. An op that was finished before is not done again.
    """
    if effort not in EFFORTS:
        raise ArgumentError(f"--effort {effort}: give one of {', '.join(EFFORTS)}")
    ops, pins = chosen_ops(op), read_pins(pin)
    loaded = read_spec(spec)
    from kvgen.tune.tuner import tune

    with progress(quiet=as_json) as advance:

        def told(step: Step) -> None:
            done, total = (1, 1) if step.stage == "done" else (step.done, step.total)
            advance(f"{step.op}: {step.stage}", done, total, _best(step))

        report = tune(loaded, target, effort=effort, ops=ops, pins=pins, progress=told, cache_dir=cache_dir)
    if as_json:
        output.print_json(report.to_dict() | {"stored": str(_folder(cache_dir, report))})
        return
    print_report(report)
    output.line(f"Winners are kept in {_folder(cache_dir, report)}")


def _folder(cache_dir: Path | None, report: TuneReport) -> Path:
    from kvgen import paths

    return (cache_dir or paths.subfolder("tune")) / report.target


def _best(step: Step) -> str:
    if step.best_s is None:
        return ""
    default = f", default {duration(step.default_s)}" if step.default_s else ""
    return f"best {duration(step.best_s)}{default}"


def print_report(report: TuneReport) -> None:
    """One row for each op, then one for each workload where an op has several."""
    predicted = any(found.how == "predicted" for found in report.ops)
    unit = 1e-12 if predicted else 1e-6
    names = [f"default {UNITS[unit]}", f"tuned {UNITS[unit]}", "speed-up"]
    columns = ["op", *names, "tried/ok/bad", "how", "what changed"]
    rows = [
        [
            found.op,
            scaled(found.default_s, unit),
            scaled(found.winner_s, unit),
            times(found.speedup),
            "-" if found.cached else "/".join(map(str, counts(found))),
            "kept" if found.cached else found.how,
            changes(found.default, found.winner),
        ]
        for found in report.ops
    ]
    title = (
        f"{report.spec} ({report.spec_hash[:8]}) on {report.target}, {report.effort}, {report.seconds:.0f} s"
    )
    if len({row[5] for row in rows}) == 1:  # said once, it leaves room for what changed
        title += f", {rows[0][5]}"
        columns, rows = [*columns[:5], columns[6]], [[*row[:5], row[6]] for row in rows]
    output.table(columns, rows, title=title, right=columns[1:5])
    workloads = [
        (
            found.op,
            bucket.bucket,
            scaled(bucket.default_s, unit),
            scaled(bucket.winner_s, unit),
            times(_ratio(bucket.default_s, bucket.winner_s)),
        )
        for found in report.ops
        if len(found.buckets) > 1 and not predicted  # a prediction is the same for all
        for bucket in found.buckets
    ]
    if workloads:
        output.table(("op", "workload", *names), workloads, title="By workload", right=names)
    output.line()
    failed = {name: count for name, count in report.outcomes.items() if name not in ("ok", "duplicate")}
    if failed:
        output.line(f"Failed candidates: {', '.join(f'{n} {name}' for name, n in failed.items())}")
    if any(found.cached for found in report.ops):
        output.line("Kept: tuned before for the same spec, target and kernels; nothing was done again.")
    if predicted:
        output.line(PREDICTED)


def counts(found: OpReport) -> tuple[int, int, int]:
    """Candidates tried, right, and failed. A duplicate was tried by its twin."""
    total, right = sum(found.outcomes.values()), found.outcomes.get("ok", 0)
    return total, right, total - right - found.outcomes.get("duplicate", 0)


def changes(default: Schedule, winner: Schedule) -> str:
    """The knobs in which the winner differs from the default."""
    before, after = default.to_dict(), winner.to_dict()
    changed = [
        f"{knob} {before.get(knob)}->{value}" for knob, value in after.items() if before.get(knob) != value
    ]
    return ", ".join(changed) or "nothing"


def scaled(seconds: float | None, unit: float) -> str:
    """A time in a unit of so many seconds, with three digits or more."""
    if seconds is None:
        return "-"
    value = seconds / unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: ``87.3 us``."""
    unit = next((size for size in UNITS if seconds >= size), min(UNITS))
    return f"{scaled(seconds, unit)} {UNITS[unit]}"


def times(speedup: float | None) -> str:
    """``1.62x``."""
    return "-" if speedup is None else f"{speedup:.2f}x"


def _ratio(default_s: float | None, winner_s: float | None) -> Any:
    return default_s / winner_s if default_s and winner_s else None
