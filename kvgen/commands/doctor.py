"""kvgen doctor: what this machine can do, and how to get what is missing."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from kvgen.commands import output
from kvgen.commands.finding import Finding
from kvgen.commands.options import AsJson


def run(as_json: AsJson = False) -> None:
    """Report what this machine can build and run.

    Says how to get what is missing. Exit code 1 only where no kernel could be made for any target.
    """
    from kvgen.commands import machine

    findings = [found for section in machine.SECTIONS for found in section()]
    usable = machine.usable_targets(findings)
    hints = [found for found in findings if found.hint]
    if as_json:
        output.print_json(
            {
                "findings": [dataclasses.asdict(found) for found in findings],
                "usable": usable,
                "hints": [f"{found.name}: {found.hint}" for found in hints],
            }
        )
    else:
        _print(findings, usable, hints)
    if not any(usable.values()):
        raise typer.Exit(1)


def _print(findings: list[Finding], usable: dict[str, str], hints: list[Finding]) -> None:
    for section in dict.fromkeys(found.section for found in findings):
        rows: list[tuple[Any, ...]] = [(f.name, f.value) for f in findings if f.section == section]
        output.table((), rows, title=section)
    output.table((), usable.items(), title="What works here")
    if hints:
        output.heading("Hints")
        for found in hints:
            output.line(f"{found.name}: {found.hint}")
