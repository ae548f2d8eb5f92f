"""What happens when a command fails: readable text and exit code 2, never a traceback for a user's mistake.

0: it worked. 1: it ran and the answer is bad (a kernel is wrong, nothing can work here). 2: it was asked
for something impossible. 130: interrupted. 141: the reader of the output went away (``| head``).
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from kvgen.commands.streams import discard_output
from kvgen.errors import ABSENT, Diagnostic, KvgenError, SpecError

REFUSED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

PACKAGES = ("jinja2", "numpy", "rich", "sympy", "torch", "triton")
"""Dependencies that are imported late, so that their absence shows in the middle of a command."""


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE.py",
        help="Run this file first: it registers codecs and variants. Several times.",
    ),
]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with ``--import``, and its failures reported: its flag ``as_json`` says in which form."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        as_json = bool(options.get("as_json"))
        try:
            _import(options.pop("imports", None) or ())
            command(**options)
            sys.stdout.flush()
        except BrokenPipeError:
            discard_output()
            raise typer.Exit(PIPE_CLOSED) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except (KvgenError, OSError) as error:
            refuse(error, as_json)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in PACKAGES:
                raise
            refuse(error, as_json)

    own = inspect.signature(command, eval_str=True)
    extra = inspect.Parameter("imports", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Imports)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), extra])  # type: ignore[attr-defined]
    run.__annotations__ = {**inspect.get_annotations(command, eval_str=True), "imports": Imports}
    return run


def _import(files: Iterable[str]) -> None:
    """Make the definitions of these files known, and those that installed packages bring."""
    from kvgen import definitions

    definitions.load_installed()
    for file in files:
        definitions.load(file)


def refuse(error: Exception, as_json: bool) -> None:
    """Print why and exit with code 2; with ``KVGEN_LOG=debug`` the traceback comes first."""
    if os.environ.get("KVGEN_LOG", "").lower() == "debug":
        traceback.print_exception(error)
    try:
        if as_json:
            print(json.dumps({"error": as_data(error)}, indent=2))
        sys.stdout.flush()
    except OSError:  # full, or its reader is gone: that may be the very error
        discard_output()
        as_json = False
    if not as_json:
        print(f"error: {message(error)}", file=sys.stderr)
    raise typer.Exit(REFUSED)


def message(error: Exception) -> str:
    """The error in words. A SpecError's own text has one line for each mistake."""
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {error.name}, which is not installed here; try: pip install {error.name}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def as_data(error: Exception) -> dict[str, Any]:
    """The error as JSON data; a SpecError lists its mistakes one by one."""
    data: dict[str, Any] = {"type": type(error).__name__, "message": message(error)}
    if isinstance(error, SpecError):
        data["diagnostics"] = [_diagnostic(found) for found in error.diagnostics]
    return data


def _diagnostic(found: Diagnostic) -> dict[str, Any]:
    value = None if found.value is ABSENT else found.value
    plain = value is None or isinstance(value, bool | int | str)
    return {
        "path": found.path,
        "value": value if plain else repr(value),
        "reason": found.reason,
        "hint": found.hint,
    }
