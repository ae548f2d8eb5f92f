"""kvgen bench SPEC...: run, print, write, compare and plot."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from kvgen.backends.cpu import machine
from kvgen.bench import Case, Settings, bench
from kvgen.bench.compare import compare, need_comparable, read_report
from kvgen.bench.facts import gather
from kvgen.bench.peers import registry
from kvgen.bench.plot import draw, need_plot
from kvgen.bench.report import WRONG, Report
from kvgen.commands import output
from kvgen.commands.bench_report import print_comparison, print_formats, print_report, print_variants
from kvgen.commands.options import read_pins
from kvgen.commands.progress import progress
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.tune.choose import UntunedWarning


def run_specs(
    specs: Sequence[Spec],
    cases: Sequence[Case],
    settings: Settings,
    *,
    threads: int | None,
    peers: Sequence[str],
    no_peers: bool,
    pins: Sequence[str] | None,
    targets: Sequence[str] = (),
    against: str | None,
    picture: str | None,
    file: str | None,
    as_json: bool,
    variants: bool = False,
    formats: bool = False,
) -> None:
    """Bench and tell; leaves with 1 where a kernel of kvgen's is wrong. The impossible is refused at once."""
    chosen = registry.choose(peers, no_peers)
    schedule = read_pins(pins)
    old = read_report(against) if against else None
    if old is not None:
        need_comparable(old.facts, gather(machine.num_threads(threads)))
    if picture is not None:
        need_plot(picture)
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise ArgumentError(f"--json {file}: no such folder")
    with progress(quiet=as_json) as say, warnings.catch_warnings(record=True) as untuned:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UntunedWarning)
        report = bench(
            specs,
            cases,
            peers=chosen,
            threads=threads,
            settings=settings,
            schedule=schedule or None,
            targets=targets,
            variants=variants,
            formats=formats,
            say=say,
        )
    data = report.to_json()
    if file is not None:
        Path(file).write_text(json.dumps(data, indent=1) + "\n")
    if picture is not None:
        draw(report, picture)
    if as_json:
        output.print_json(data)
    else:
        if formats:
            print_formats(report)
        elif variants:
            print_variants(report)
        else:
            print_report(report, [] if no_peers or peers else registry.missing())
        tell(report, old, [note.message for note in untuned], all_peers=not (no_peers or peers))
    if any(row.spec is not None and row.status == WRONG for case in report.cases for row in case.rows):
        raise typer.Exit(1)


def tell(report: Report, old: Report | None, notes: Sequence[Warning | str], *, all_peers: bool) -> None:
    """Print who might have taken part as well, and what changed."""
    slow = [peer.name for peer in registry.PEERS.values() if peer.slow and peer.installed]
    if all_peers and slow:
        output.line(f"Only when named, since it compiles for each case: {', '.join(slow)} (--peers all).")
    for text in together(map(str, notes)):
        output.line(f"note: {text}")
    if old is not None:
        print_comparison(compare(old, report))


def together(notes: Iterable[str]) -> list[str]:
    """``a on cpu: x`` and ``b on cpu: x`` as ``a, b on cpu: x``."""
    names: dict[str, list[str]] = {}
    for note in notes:
        name, _, rest = note.partition(" on ")
        if name not in names.setdefault(rest, []):
            names[rest].append(name)
    return [f"{', '.join(found)} on {rest}" for rest, found in names.items()]
