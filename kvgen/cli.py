"""The ``kvgen`` command: ``kvgen --help`` says what it can do. Commands live in ``kvgen.commands``.

This module and the commands import typer and nothing heavier, so that help appears at once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, TextIO

import typer

from kvgen import __version__
from kvgen.commands import (
    bench,
    diff,
    doctor,
    explain,
    export,
    generate,
    listing,
    quality,
    run,
    show,
    tune,
    verify,
)
from kvgen.commands.failures import REFUSED, guarded, message
from kvgen.commands.streams import discard_output, open_missing

app = typer.Typer(
    name="kvgen",
    help="Generate, prove and tune KV-cache attention kernels from a description of the cache.",
    epilog="Start with: kvgen tune examples/llama3-8b-int8.toml",
    no_args_is_help=True,
    # rich takes twice as long to import as the rest of the command: only where its colours can be seen.
    rich_markup_mode="rich" if sys.stdout is not None and sys.stdout.isatty() else None,
    # A traceback that reaches the user is a fault of kvgen, and is best reported as Python prints it.
    pretty_exceptions_enable=False,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "tune": tune.run,
    "list": listing.run,
    "show": show.run,
    "explain": explain.run,
    "generate": generate.run,
    "diff": diff.run,
    "export": export.run,
    "verify": verify.run,
    "bench": bench.run,
    "run": run.run,
    "quality": quality.run,
    "doctor": doctor.run,
}
"""Every command, in the order in which help shows them."""

for _name, _command in COMMANDS.items():
    app.command(_name)(guarded(_command))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Generate, prove and tune KV-cache attention kernels from a description of the cache."""


def main() -> None:
    """Entry point of the installed command and of ``python -m kvgen``."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        # A spec's name may hold letters that the terminal's encoding lacks: show them escaped, don't fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.showwarning = _show_warning
    try:
        app()
    except OSError as error:  # help that cannot be written; commands have their own guard
        discard_output()
        print(f"error: {message(error)}", file=sys.stderr)
        sys.exit(REFUSED)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line for people, instead of the place in kvgen's source that warned."""
    print(f"warning: {message}", file=file or sys.stderr)
