"""The report of ``kvgen tune`` as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvgen.commands import output
from kvgen.units import scaled

if TYPE_CHECKING:
    from kvgen.ir import Schedule
    from kvgen.tune.outcome import OpReport, TuneReport

UNITS = {1.0: "s", 1e-3: "ms", 1e-6: "us", 1e-9: "ns", 1e-12: "ps"}

SPARED = {"build": "builds", "check": "checks", "time": "timings", "pair": "paired timings"}
"""Words for what the log of an interrupted run spares."""

FAILURES = 8
"""Most failures that are told one by one."""

PREDICTED = (
    "Predicted: ps per KV token and KV head (decode, prefill), per row or per element, from the compiled "
    "binaries and data-sheet figures. Nothing was run."
)

WORDS = {"compile_error": "not compiled", "duplicate": "merged", "crash": "crashed", "timeout": "timed out"}
"""Words for outcomes, where they are not their own."""


def print_report(report: TuneReport) -> None:
    """One row for each op, then one for each workload where an op has several, then what went wrong."""
    predicted = any(found.how == "predicted" for found in report.ops)
    unit = 1e-12 if predicted else 1e-6
    names = [f"default {UNITS[unit]}", f"tuned {UNITS[unit]}", "speed-up"]
    columns = ["op", *names, "seconds", "candidates", "how", "what changed"]
    rows = [
        [
            found.op,
            scaled(found.default_s, unit),
            scaled(found.winner_s, unit),
            times(found.speedup),
            "-" if found.cached else f"{found.seconds:.1f}",
            ends(found),
            "kept" if found.cached else found.how,
            changes(found.default, found.winner),
        ]
        for found in report.ops
    ]
    title = (
        f"{report.spec} ({report.spec_hash[:8]}) on {report.target}, {report.effort}, {report.seconds:.0f} s"
    )
    if len({row[6] for row in rows}) == 1:  # said once, it leaves room for what changed
        title += f", {rows[0][6]}"
        columns, rows = [*columns[:6], columns[7]], [[*row[:6], row[7]] for row in rows]
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
    for text in remarks(report):
        output.line(text)
    if predicted:
        output.line(PREDICTED)


def remarks(report: TuneReport) -> Iterator[str]:
    """A line for each failure, and for what was not done, and why."""
    failed = [
        (found.op, trial)
        for found in report.ops
        for trial in found.trials
        if trial.outcome.value not in ("ok", "duplicate", "skipped")
    ]
    for op, trial in failed[:FAILURES]:
        reason = (trial.message.splitlines() or [""])[0]
        yield f"{op}, {trial.schedule}: {trial.outcome.value}: {reason}"
    if len(failed) > FAILURES:
        yield f"and {len(failed) - FAILURES} more failures (--json has all)"
    merged, skipped = (report.outcomes.get(name, 0) for name in ("duplicate", "skipped"))
    if merged:
        yield f"Merged: {merged} with the source or machine code of another candidate, which stands for them."
    if skipped:
        yield f"Skipped: {skipped} for lack of time; --effort full has no limit."
    for found in report.ops:
        if found.resumed:
            parts = [
                f"{found.resumed[kind]} {word}" for kind, word in SPARED.items() if kind in found.resumed
            ]
            yield f"Resumed: {found.op}: {', '.join(parts)} were in its log and were not done again."
        yield from found.notes
    if any(found.cached for found in report.ops):
        yield "Kept: tuned before for the same spec, target and kernels; nothing was done again."


def ends(found: OpReport) -> str:
    """How many candidates there were, and how they ended where not all were right: ``12: 9 ok, 3 wrong``."""
    if found.cached:
        return "-"
    total = sum(found.outcomes.values())
    parts = [f"{count} {WORDS.get(name, name)}" for name, count in found.outcomes.items()]
    return (
        f"{total} ok" if set(found.outcomes) == {"ok"} else f"{total}: {', '.join(sorted(parts, key=_last))}"
    )


def _last(text: str) -> tuple[bool, str]:
    return (not text.endswith(" ok"), text)


def changes(default: Schedule, winner: Schedule) -> str:
    """The knobs in which the winner differs from the default."""
    before, after = default.to_dict(), winner.to_dict()
    changed = [
        f"{knob} {before.get(knob)}->{value}" for knob, value in after.items() if before.get(knob) != value
    ]
    return ", ".join(changed) or "nothing"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: ``87.3 us``."""
    unit = next((size for size in UNITS if seconds >= size), min(UNITS))
    return f"{scaled(seconds, unit)} {UNITS[unit]}"


def times(speedup: float | None) -> str:
    """``1.62x``."""
    return "-" if speedup is None else f"{speedup:.2f}x"


def _ratio(default_s: float | None, winner_s: float | None) -> Any:
    return default_s / winner_s if default_s and winner_s else None
