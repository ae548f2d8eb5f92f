"""How commands print: rich tables on a terminal, aligned plain lines elsewhere, one JSON document on request.

Plain output is what scripts and logs get: no colours, no frames, no wrapping, so one row stays one line.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvgen.commands.columns import fit, measure

if TYPE_CHECKING:
    from rich.console import Console

Row = Sequence[object]


def is_terminal() -> bool:
    """Whether a person reads the output as it appears."""
    return sys.stdout.isatty()


@functools.cache
def console() -> Console:
    """The console for terminals; nothing is highlighted that was not asked for."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_json(data: object) -> None:
    """One indented JSON document; key order is the order in which the data was built."""
    print(json.dumps(data, indent=2))


def line(text: str = "") -> None:
    """One line of text, never cut."""
    if is_terminal():
        console().print(text, markup=False, soft_wrap=True)
    else:
        print(text)


def heading(text: str) -> None:
    """A title with an empty line before it."""
    if is_terminal():
        console().print(f"\n{text}", style="bold", markup=False)
    else:
        print(f"\n{text}")


def facts(pairs: Mapping[str, object]) -> None:
    """Name and value, one pair a line."""
    table((), pairs.items())


def table(columns: Sequence[str], rows: Iterable[Row], title: str = "", right: Sequence[str] = ()) -> None:
    """Rows under ``columns`` (none: no header). The columns named in ``right`` are aligned to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    if title:
        heading(title)
    if is_terminal():
        _rich_table(columns, cells, right)
    else:
        _plain_table(columns, cells, right)


def code(text: str, language: str) -> None:
    """Source code, highlighted on a terminal and untouched elsewhere."""
    if not is_terminal():
        print(text, end="" if text.endswith("\n") else "\n")
        return
    from rich.syntax import Syntax

    styled = Syntax(text, language, theme="ansi_dark", background_color="default").highlight(text)
    console().print(styled, end="", soft_wrap=True)  # the terminal wraps: a copied line stays one line


def grouped(number: int) -> str:
    """1234567 as ``1,234,567``."""
    return f"{number:,}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return grouped(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _plain_table(columns: Sequence[str], rows: list[list[str]], right: Sequence[str]) -> None:
    lines = [list(columns), *rows] if columns else rows
    if not lines:
        return
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    for row in lines:
        padded = [
            text.rjust(width) if columns and columns[i] in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())


def _rich_table(columns: Sequence[str], rows: list[list[str]], right: Sequence[str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    width, gap = console().width, 2 if columns else 1
    parts = fit(measure(columns, rows, frozenset(right)), width, gap)
    for at, widths in enumerate(parts):
        frame: dict[str, Any] = {"box": box.SIMPLE_HEAD if columns else None, "show_edge": False}
        made = Table(show_header=bool(columns), pad_edge=False, padding=(0, 1, 0, 0), **frame)
        for index, size in widths.items():
            name = columns[index] if columns else ""
            justify: Any = "right" if name in right else "left"
            style = "cyan" if index == 0 else ""
            made.add_column(Text(name), style=style, overflow="fold", width=size, justify=justify)
        for row in rows:
            made.add_row(*(Text(row[index]) for index in widths))
        if at:
            console().print()
        console().print(made)
