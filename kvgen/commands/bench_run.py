"""kvgen bench SPEC...: run, print, write, compare and plot."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from kvgen.backends.cpu import machine
from kvgen.bench import Case, Settings, bench
from kvgen.bench.compare import compare, need_comparable, read_report
from kvgen.bench.facts import gather
from kvgen.bench.peers import registry
from kvgen.bench.plot import draw, need_plot
from kvgen.commands import output
from kvgen.commands.bench_report import print_comparison, print_report
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
    against: str | None,
    picture: str | None,
    file: str | None,
    as_json: bool,
) -> None:
    """What cannot work is refused before the first minute is spent."""
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
            specs, cases, peers=chosen, threads=threads, settings=settings, schedule=schedule or None, say=say
        )
    data = report.to_json()
    if file is not None:
        Path(file).write_text(json.dumps(data, indent=1) + "\n")
    if picture is not None:
        draw(report, picture)
    if as_json:
        output.print_json(data)
        return
    print_report(report, [] if no_peers or peers else registry.missing())
    for text in dict.fromkeys(str(warning.message) for warning in untuned):
        output.line(f"note: {text}")
    if old is not None:
        print_comparison(compare(old, report))
