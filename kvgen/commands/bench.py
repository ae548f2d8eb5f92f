"""kvgen bench: decode against torch's SDPA and the memory's read limit, in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, read_spec

if TYPE_CHECKING:
    from kvgen.bench import Report

SpecPaths = Annotated[list[str], typer.Argument(metavar="SPEC...", help="TOML files that describe caches.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Requests.")]
Context = Annotated[int, typer.Option("--context", min=1, help="Keys of each request.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")]
Rounds = Annotated[int, typer.Option("--rounds", min=3, help="Turns that each contender takes.")]


def run(
    specs: SpecPaths,
    batch: Batch = 8,
    context: Context = 4096,
    threads: Threads = None,
    rounds: Rounds = 15,
    as_json: AsJson = False,
) -> None:
    """Time decode on this CPU against torch's SDPA and the memory's read limit.

    Contenders take turns in one process, on the same values, and their outputs are compared before
    anything is timed. SDPA gets its best form: contiguous K and V, query heads folded into rows.
    """
    loaded = [read_spec(spec) for spec in specs]
    from kvgen.bench import bench_decode

    reports = [
        bench_decode(spec, batch=batch, context=context, threads=threads, rounds=rounds) for spec in loaded
    ]
    if as_json:
        output.print_json([report.to_json() for report in reports])
        return
    for report in reports:
        _print(report)


def _print(report: Report) -> None:
    title = f"{report.spec}: decode {report.batch} x {report.context}, {report.threads} threads"
    rows = [
        (
            row.contender,
            f"{row.median_us:,.0f}",
            f"{row.least_us:,.0f}",
            f"{row.gb_per_s:.1f}",
            f"{row.ratio:.2f}",
        )
        for row in report.rows
    ]
    columns = ("contender", "median us", "least us", "GB/s", "times kvgen's")
    output.table(columns, rows, title=title, right=columns[1:])
    output.line(
        f"read limit of the same pool {report.read_limit_gb_per_s:.1f} GB/s; "
        f"kvgen reaches {report.fraction_of_read_limit:.2f} of it"
    )
