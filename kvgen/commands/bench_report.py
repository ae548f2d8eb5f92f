"""The report of ``kvgen bench`` as text: a table for each case, and what must be said about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvgen.bench.report import DISTURBED, OK, WRONG
from kvgen.commands import output
from kvgen.units import scaled

if TYPE_CHECKING:
    from kvgen.bench.compare import Comparison
    from kvgen.bench.peers.registry import Peer
    from kvgen.bench.report import CaseReport, Report

STOLEN = 0.01
"""Share of the machine's time in its hypervisor's hands from which a case says so."""


def print_report(report: Report, missing: Sequence[Peer]) -> None:
    """All cases, then what holds for all of them."""
    short = short_names(list(report.specs))
    for case in report.cases:
        print_case(case, short, report.facts.threads)
    print_facts(report, "over: its time over kvgen's in the same rounds; error: over the largest output.")
    packages = {peer.package: peer for peer in missing}
    for peer in packages.values():
        names = ", ".join(other.name for other in missing if other.package == peer.package)
        output.line(f"Not here: {names}; to compare: {peer.install}")


def print_facts(report: Report, meaning: str) -> None:
    """The machine, and what the columns mean."""
    output.line()
    facts = report.facts
    output.line(
        f"{facts.cpu}, {facts.isa}, L3 {facts.l3_bytes >> 20} MB, huge pages {facts.huge_pages}, "
        f"torch {facts.torch}. us: median; +-: half the quartiles' distance; samples (dropped); {meaning}"
    )
    if not report.waits_counted:
        output.line(
            "This kernel does not count how long threads wait for a core (/proc/self/task/*/schedstat): "
            "no sample was dropped, and figures of a busy machine cannot be told from others."
        )


def print_variants(report: Report) -> None:
    """One table for each case and spec: a row for each mask, score and sink, beside its plain kernel."""
    _print_pairs(report, VARIANT_COLUMNS, variant_row)
    print_facts(report, "ratio: the variant's time over the plain kernel's in the same rounds.")


def print_formats(report: Report) -> None:
    """One table for each case and spec: a row for each codec, beside bf16."""
    _print_pairs(report, FORMAT_COLUMNS, format_row)
    what = "ratio: the format's time over bf16's in the same rounds; kB: bytes of cache that a call moves."
    print_facts(report, what)


def _print_pairs(report: Report, columns: Sequence[str], told: Callable[[CaseReport], list[str]]) -> None:
    tables: dict[str, list[CaseReport]] = {}
    for case in report.cases:
        tables.setdefault(f"{case.title}: {case.shape}, {_threads(report.facts.threads)}", []).append(case)
    for title, cases in tables.items():
        rows = [told(case) for case in cases]
        output.table(columns, rows, title=title, right=columns[1:])
        for name, why in (each for case in cases for each in case.left_out.items()):
            output.line(f"{name}: left out: {why}")
        for row in (row for case in cases for row in case.rows if row.status == WRONG):
            output.line(f"{row.contender}: wrong: {row.message}")


FORMAT_COLUMNS = ("format", "us", "bf16 us", "ratio", "+-", "kB", "of bf16's", "samples", "error")


def format_row(case: CaseReport) -> list[str]:
    """One codec of a case: its time and bytes, and what they are of bf16's."""
    found = variant_row(case)
    if not case.rows:
        return [found[0], *["-"] * (len(FORMAT_COLUMNS) - 1)]
    plain, coded = case.rows
    moved = [f"{coded.nbytes / 1e3:.0f}", f"{coded.nbytes / plain.nbytes:.2f}" if plain.nbytes else "-"]
    return [found[0], *found[2:6], *moved, *found[6:]]


VARIANT_COLUMNS = ("variant", "beside", "us", "plain us", "ratio", "+-", "samples", "error")


def variant_row(case: CaseReport) -> list[str]:
    """One variant of a case: its time, that of its plain kernel, and their ratio."""
    name = case.case.partition(": ")[2]
    if not case.rows:
        return [name, *["-"] * (len(VARIANT_COLUMNS) - 1)]
    plain, variant = case.rows
    ratio = variant.ratios.get(plain.spec or "")
    times = [scaled(row.seconds.median, 1e-6) if row.seconds else row.status for row in (variant, plain)]
    return [
        name,
        plain.spec or "",
        *times,
        f"{ratio.median:.2f}" if ratio else "-",
        f"{ratio.spread:.0%}" if ratio else "-",
        f"{len(variant.samples)} ({variant.dropped})",
        "-" if variant.error is None else f"{variant.error:.1e}",
    ]


def print_case(case: CaseReport, short: dict[str, str], threads: int) -> None:
    """The table of one case, and its remarks."""
    names = [limit.of for limit in case.limits]
    columns = ["contender", "us", "+-", "samples"]
    columns += ["GFLOP/s", "of peak"] if case.peaks else ["GB/s", "of read limit"]
    columns += ["error", *(f"over {short.get(name, name)}" for name in names)]
    rows = []
    for row in case.rows:
        few = "~" if row.status == DISTURBED else ""
        cells = [
            row.contender,
            few + scaled(row.seconds.median, 1e-6) if row.seconds else row.status,
            f"{row.seconds.spread:.0%}" if row.seconds else "-",
            f"{len(row.samples)} ({row.dropped})" if row.seconds or row.dropped else "-",
        ]
        speed, share = (row.gflop_per_s, row.of_peak) if case.peaks else (row.gb_per_s, row.fraction)
        cells += [f"{speed:.1f}" if speed else "-", f"{share.median:.2f}" if share else "-"]
        cells += ["-" if row.error is None else f"{row.error:.1e}"]
        cells += [f"{row.ratios[name].median:.2f}" if name in row.ratios else "-" for name in names]
        rows.append(cells)
    title = f"{case.title}: {case.shape}, {_threads(threads)}, {case.rounds} rounds"
    output.table(columns, rows, title=title, right=columns[1:])
    for text in remarks(case, short):
        output.line(text)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def remarks(case: CaseReport, short: dict[str, str]) -> Iterator[str]:
    """What the figures of a case mean, and what is wrong with them."""
    limits = [
        f"{limit.bytes_per_s.median / 1e9:.1f} GB/s +-{limit.bytes_per_s.spread:.0%} "
        f"({short.get(limit.of, limit.of)}, {limit.nbytes / 1e6:,.0f} MB)"
        for limit in case.limits
        if limit.bytes_per_s
    ]
    known = ", ".join(limits) or "none; every sample of it was dropped"
    yield f"Read limit of the same pools: {known}."
    if case.peaks:
        peaks = [f"{value.median / 1e9:,.0f} GFLOP/s in {kind}" for kind, value in case.peaks.items()]
        yield f"Peak of arithmetic from registers: {', '.join(peaks)}."
    if case.scaling is not None:
        who = f"Memory in {case.mode} mode: all threads" if case.mode else "All threads"
        rest = case.other_mode_rounds
        others = f"; {rest} rounds in the other mode do not count" if rest else ""
        yield f"{who} read {case.scaling:.2f} times as fast as one{others}."
    yield from _specs(case, short)
    for row in case.rows:
        if row.over_even is not None:
            times = f"{row.over_even.median:.2f} times"
            yield f"{row.contender}: {times} as long as equal requests of as many keys."
    for row in case.rows:
        if row.message and row.status != DISTURBED:
            status = "" if row.status == OK else f"{row.status}: "
            yield f"{row.contender}: {status}{row.message}"
    disturbed = [row.contender for row in case.rows if row.status == DISTURBED]
    if disturbed:
        names = "all" if len(disturbed) == len(case.rows) > 1 else ", ".join(disturbed)
        yield (
            f"Disturbed, so read with care: {names}. Few samples, or most were dropped as "
            "threads waited for a core. A quieter machine helps, or more --seconds."
        )
    for name, reason in case.left_out.items():
        yield f"{name}: left out: {reason}"
    if case.stolen is not None and case.stolen > STOLEN:
        yield f"The hypervisor took {case.stolen:.0%} of this machine's time meanwhile."


def _specs(case: CaseReport, short: dict[str, str]) -> Iterator[str]:
    """How much faster each spec is than the first one."""
    ours = [row for row in case.rows if row.spec is not None and row.case == case.case and row.status == OK]
    for row in ours[1:]:
        first = ours[0].spec or ""
        if first in row.ratios:
            speed, name = 1 / row.ratios[first].median, short.get(row.spec or "", row.contender)
            yield f"{name} is {speed:.2f} times as fast as {short.get(first, first)}."


def print_comparison(found: Comparison) -> None:
    """Then and now, as ratios of ratios."""
    rows = [
        (
            change.case,
            change.contender,
            change.what,
            f"{change.old:.3f}",
            f"{change.new:.3f}",
            f"{change.ratio:.3f}",
            f"{change.noise:.0%}",
            "yes" if change.clear else "no",
        )
        for change in found.changes
    ]
    columns = ("case", "contender", "figure", "then", "now", "now/then", "noise", "clear")
    output.table(columns, rows, title="Compared with the earlier report", right=columns[3:7])
    for name in found.redefined:
        output.line(f"{name}: the name stood for another spec then")
    for text, names in (
        ("Only then", found.only_old),
        ("Only now", found.only_new),
        ("Disturbed then or now", found.disturbed),
    ):
        if names:
            output.line(f"{text}: {'; '.join(names)}")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """What tells the specs apart: ``llama3-8b-bf16`` and ``llama3-8b-int8`` are ``bf16`` and ``int8``."""
    if len(names) < 2:
        return dict.fromkeys(names, "kvgen")
    words = [name.split("-") for name in names]
    same = 0
    while all(len(parts) > same + 1 and parts[same] == words[0][same] for parts in words):
        same += 1
    return {name: "-".join(parts[same:]) for name, parts in zip(names, words, strict=True)}
