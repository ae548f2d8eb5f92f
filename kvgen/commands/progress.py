"""Progress of long commands, on stderr: a bar on a terminal, one line for each new stage elsewhere.

stderr, so that the answer on stdout can be piped or parsed while a person still sees how it goes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[str, int, int, str], None]
"""Called as advance(stage, done, total, note); ``note`` is a short text such as the best so far."""


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Advance]:
    """Shows progress until the block ends. ``quiet`` shows none (for ``--json``)."""
    if quiet:
        yield lambda stage, done, total, note: None
    elif sys.stderr.isatty():
        with _bar() as advance:
            yield advance
    else:
        yield _lines()


@contextlib.contextmanager
def _bar() -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    # The bar goes away at the end: what stays on the screen is the answer.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None, note="")

        def advance(stage: str, done: int, total: int, note: str) -> None:
            bar.update(task, description=stage, completed=done, total=total, note=note)

        yield advance


def _lines() -> Advance:
    told: set[str] = set()

    def advance(stage: str, done: int, total: int, note: str) -> None:
        if stage not in told:  # stages alternate while the tuner moves from the best to its neighbours
            told.add(stage)
            count = f" ({total})" if total > 1 else ""
            print(f"{stage}{count or (note and f': {note}')}", file=sys.stderr, flush=True)

    return advance
