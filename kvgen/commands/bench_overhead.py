"""kvgen bench --overhead: what one call costs beside the memory it reads."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.commands import output
from kvgen.commands.options import read_spec


def run(specs: Sequence[str], *, threads: int | None, as_json: bool) -> None:
    """Print the cost of a decode and an append of one token, from Python and from C.

    Without a spec, of a tiny one: what is left then is next to nothing but the call.
    """
    from kvgen.overhead import KEYS, TINY, measure
    from kvgen.passes.validate import load_spec

    loaded = [read_spec(spec) for spec in specs] or [load_spec(TINY)]
    found = [row for spec in loaded for row in measure(spec, threads=threads or 1)]
    if as_json:
        output.print_json([row.to_dict() for row in found])
        return
    columns = ("spec", "op", "called from", "least us", "median us")
    rows = [(r.spec, r.op, r.call, f"{r.least_us:.2f}", f"{r.median_us:.2f}") for r in found]
    title = f"one request of {KEYS} keys, one token appended, {threads or 1} threads, everything given"
    output.table(columns, rows, title=title, right=columns[3:])
