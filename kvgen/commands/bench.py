"""kvgen bench: decode against torch's SDPA and the memory's read limit, in one run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, read_spec
from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.bench import Report

SpecPaths = Annotated[
    list[str] | None, typer.Argument(metavar="SPEC...", help="TOML files that describe caches.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME|FOLDER", help="Bench a real model instead: see kvgen run."),
]
Pages = Annotated[
    list[str] | None,
    typer.Option("--pages", metavar="KIND", help="With --model: f32 (default), bf16, int8; several times."),
]
Batch = Annotated[
    list[int] | None, typer.Option("--batch", min=1, help="Requests; several times. Default 8; a model 1, 8.")
]
Context = Annotated[
    int | None,
    typer.Option("--context", min=1, help="Keys of each request, 4096; with --model the prompt's, 128."),
]
NewTokens = Annotated[int | None, typer.Option("--max-tokens", min=2, help="With --model: new tokens, 32.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", min=3, help="Turns that each contender takes: 15; with --model 3.")
]

GpuCheck = Annotated[
    str | None,
    typer.Option(
        "--gpu-check",
        metavar="DIR",
        help="Run the prepared check of a GPU in DIR instead: minutes, no compiler.",
    ),
]


def run(
    specs: SpecPaths = None,
    model: ModelName = None,
    gpu_check: GpuCheck = None,
    pages: Pages = None,
    batch: Batch = None,
    context: Context = None,
    new_tokens: NewTokens = None,
    threads: Threads = None,
    rounds: Rounds = None,
    as_json: AsJson = False,
) -> None:
    """Time decode on this CPU against torch's SDPA and the memory's read limit.

    Contenders take turns in one process, on the same values, and their outputs are compared before
    anything is timed. SDPA gets its best form: contiguous K and V, query heads folded into rows.

    With --model: decoded tokens a second of the whole model, against transformers' eager and SDPA.
    """
    if gpu_check is not None:
        # Imported by name: it brings what only a machine with a GPU needs.
        importlib.import_module("kvgen.commands.gpu_check").run(gpu_check, specs or [], as_json=as_json)
        return
    if model is not None:
        if specs:
            raise ArgumentError(f"SPEC {specs[0]}: --model makes its own spec; give one of the two")
        from kvgen.commands.bench_model import run_model

        run_model(
            model,
            pages=pages,
            batches=batch or [1, 8],
            prompt=context or 128,
            new_tokens=new_tokens or 32,
            threads=threads,
            rounds=rounds or 3,
            as_json=as_json,
        )
        return
    for option, value in (("--pages", pages), ("--max-tokens", new_tokens)):
        if value:
            raise ArgumentError(f"{option}: only a model has one; give --model as well")
    if not specs:
        raise ArgumentError("SPEC: none given; give a TOML file, or --model")
    loaded = [read_spec(spec) for spec in specs]
    from kvgen.bench import bench_decode

    reports = [
        bench_decode(spec, batch=size, context=context or 4096, threads=threads, rounds=rounds or 15)
        for spec in loaded
        for size in batch or [8]
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
