"""kvgen export: write a Python package with the kernels of a spec, which runs without kvgen."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, Pins, SpecPath, read_pins, read_spec
from kvgen.commands.progress import progress


def run(
    spec: SpecPath,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="New or empty folder for the package.")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            "-t",
            metavar="NAME",
            help="May be given several times; default: CPU rows, sm_80, sm_90.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name of the package; default: from the spec's.")
    ] = "",
    pin: Pins = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in DIR.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a Python package that runs the six ops without kvgen.

    It holds CPU kernels ready to load, readable Triton kernels with their binaries, the page record, and a
    manifest with schedules and digests. Schedules are the tuned ones where kvgen tune has found some.
    """
    loaded, pins = read_spec(spec), read_pins(pin)
    import warnings

    from kvgen.backends.triton.process import why_absent
    from kvgen.export.package import GPU_TARGETS, export
    from kvgen.tune.choose import UntunedWarning

    with progress(quiet=as_json) as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        made = export(
            loaded,
            to,
            targets=target or (),
            name=name,
            schedule=pins,
            force=force,
            progress=lambda stage, done, total: advance(stage, done, total, ""),
        )
    targets: dict[str, Any] = {key: len(kernels) for key, kernels in made.manifest.targets.items()}
    if as_json:
        output.print_json(
            {
                "folder": str(made.folder),
                "package": made.name,
                "spec": loaded.hash,
                "kernels": targets,
                "files": made.files,
                "bytes": made.nbytes,
            }
        )
        return
    output.table(
        ("target", "kernels"), [(key, str(count)) for key, count in targets.items()], right=("kernels",)
    )
    if not target and (why := why_absent()):
        output.line(f"{', '.join(GPU_TARGETS)} left out: {why}")
    output.line(f"{made.name} in {made.folder}: {made.files} files, {made.nbytes / 2**20:.1f} MiB")
    if Path.cwd().is_relative_to(made.folder.resolve()):
        output.line("The folder that your shell stands in is a new one: cd .")
    # With a bare name pip would look for a project of that name in its index.
    where = made.folder if made.folder.is_absolute() else f"./{made.folder}"
    output.line(f"Use it: pip install {shlex.quote(str(where))}, then: import {made.name}")
