"""kvgen verify: build kernels and prove each against the float64 oracle on hard cases."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from kvgen.commands import output
from kvgen.commands.options import (
    AsJson,
    OpNames,
    Pins,
    SpecPath,
    TargetName,
    assembled,
    chosen_ops,
    read_spec,
)
from kvgen.commands.progress import Advance, progress
from kvgen.errors import KvgenError, ToolchainError

if TYPE_CHECKING:
    from kvgen.ir import Target
    from kvgen.library import Library

WRONG = 1


def run(
    spec: SpecPath, target: TargetName = "cpu", op: OpNames = None, pin: Pins = None, as_json: AsJson = False
) -> None:
    """Build the kernels and prove them against the oracle.

    Every variant of every op runs on poisoned buffers, permuted page tables and ragged lengths, and is
    compared with a float64 computation that shares no address with it. Exit code 1 where one is wrong.
    """
    ops = chosen_ops(op)
    loaded = read_spec(spec)
    library = assembled(loaded, target, pin)
    require_device(library.target)
    with progress(quiet=as_json) as advance:
        rows = list(verdicts(library, ops, advance))
    bad = [row for row in rows if not row["ok"]]
    if as_json:
        about = {"name": loaded.name, "hash": loaded.hash, "target": library.target.name}
        output.print_json(about | {"ok": not bad, "verdicts": rows})
    else:
        _print(library, rows, bad)
    if bad:
        raise typer.Exit(WRONG)


def require_device(target: Target) -> None:
    """Raise with the reason where kernels for ``target`` cannot run on this machine."""
    if target.backend == "cpu":
        from kvgen.backends.cpu import isa

        isa.check_runnable((*isa.ROWS[target.arch].required, *target.features), what=target.name)
    elif not target.interpreted:
        from kvgen.backends.triton.launch_device import why_not

        if reason := why_not(target.name):
            raise ToolchainError(f"target {target.name}: {reason}")


def verdicts(library: Library, ops: Sequence[str], advance: Advance) -> Iterator[dict[str, Any]]:
    """One row for each kernel; a kernel that cannot be built or launched gets one too."""
    from kvgen.commands.generate import variants
    from kvgen.tune.check import check_op

    kernels = [(op, variant) for op in ops for variant in variants(library, op)]
    for done, (op, variant) in enumerate(kernels):
        name = f"{op} {variant}".strip()
        advance("building and proving", done, len(kernels), name)
        start = time.monotonic()
        try:
            row = dataclasses.asdict(check_op(library, op, variant))
        except KvgenError as error:
            # The others are still worth knowing: one kernel that does not build fails alone.
            row = {"op": op, "variant": variant, "ok": False, "message": f"{type(error).__name__}: {error}"}
        if not math.isfinite(row.get("error", 0.0)):
            row["error"] = str(row["error"])  # JSON has neither NaN nor infinity
        yield row | {"seconds": round(time.monotonic() - start, 3)}


def _print(library: Library, rows: list[dict[str, Any]], bad: list[dict[str, Any]]) -> None:
    table = [
        (
            row["op"],
            row["variant"],
            "ok" if row["ok"] else "WRONG" if "cases" in row else "FAILED",
            row.get("cases"),
            _error(row),
            _tolerance(row),
            row.get("case", ""),
        )
        for row in rows
    ]
    columns = ("op", "variant", "", "cases", "error", "allowed", "worst case")
    title = f"{library.spec.name} on {library.target.name}, against the float64 oracle"
    output.table(columns, table, title=title, right=("cases", "error", "allowed"))
    for message in dict.fromkeys(row["message"] for row in bad):
        names = ", ".join(f"{row['op']} {row['variant']}".strip() for row in bad if row["message"] == message)
        output.line(f"\n{names}: {message}")
    output.line(f"\n{len(rows) - len(bad)} of {len(rows)} kernels proven")


def _error(row: dict[str, Any]) -> str:
    error = row.get("error")
    if error is None or isinstance(error, str):
        return error or "-"
    return f"{error:.1e}" if row["tolerance"] else f"{error:.0f} bytes"


def _tolerance(row: dict[str, Any]) -> str:
    if "tolerance" not in row:
        return "-"
    return f"{row['tolerance']:.0e}" if row["tolerance"] else "0 bytes"
