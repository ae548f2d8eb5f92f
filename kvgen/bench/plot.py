"""plot: a report as bars of time, the fastest first, one panel a case. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgen.bench.report import DISTURBED, CaseReport, Report, Row
from kvgen.bench.stats import Figure
from kvgen.errors import ArgumentError, ToolchainError
from kvgen.models.extras import installed
from kvgen.units import scaled

SUFFIXES = (".png", ".svg", ".pdf")

OURS, THEIRS = "#1f6f8b", "#b9c4c9"

SHARE = 0.62
"""Of a panel's width, what the longest bar takes: the rest is for its figures."""


def need_plot(path: str) -> None:
    """Raise where ``draw`` could not: another suffix, no such folder, no matplotlib."""
    place = Path(path)
    if place.suffix not in SUFFIXES:
        raise ArgumentError(
            f"--plot {path}: give a name that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    if not place.absolute().parent.is_dir():
        raise ArgumentError(f"--plot {path}: no such folder")
    if not installed("matplotlib"):
        raise ToolchainError("--plot: matplotlib is not installed here; try: pip install 'kvgen[plot]'")


def draw(report: Report, path: str) -> None:
    """Write the picture. Raises what ``need_plot`` raises."""
    need_plot(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in report.cases if any(row.seconds for row in case.rows)]
    heights = [1.0 + 0.28 * len(_bars(case)) for case in cases] or [1.0]
    figure, panels = pyplot.subplots(
        len(heights), 1, figsize=(9, sum(heights) + 0.6), squeeze=False, height_ratios=heights
    )
    for case, panel in zip(cases, panels[:, 0], strict=False):
        _panel(panel, case)
    facts, plural = report.facts, "s" if report.facts.threads > 1 else ""
    title = f"cpu-{facts.isa}: {facts.cpu}, {facts.threads} thread{plural}, kvgen {facts.kvgen}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata=undated(path))
    pyplot.close(figure)


def undated(path: str) -> dict[str, None] | None:
    """Metadata for ``savefig`` with which the same report gives the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix)


def _bars(case: CaseReport) -> list[tuple[Row, Figure]]:
    """Who was timed, the fastest first."""
    timed = [(row, row.seconds) for row in case.rows if row.seconds is not None]
    return sorted(timed, key=lambda bar: bar[1].median)


def _panel(panel: Any, case: CaseReport) -> None:
    """Bars of one case with their figures, and whiskers from quartile to quartile."""
    bars = _bars(case)
    at = range(len(bars))
    times = [1e6 * seconds.median for _, seconds in bars]
    lower = [1e6 * (seconds.median - seconds.low) for _, seconds in bars]
    upper = [1e6 * (seconds.high - seconds.median) for _, seconds in bars]
    colours = [OURS if row.spec else THEIRS for row, _ in bars]
    panel.barh(at, times, xerr=[lower, upper], color=colours, error_kw={"lw": 0.8})
    for place, (row, seconds) in enumerate(bars):
        right = 1e6 * max(seconds.high, seconds.median)
        panel.annotate(
            figures(row, seconds, bool(case.peaks)),
            (right, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    panel.set_yticks(at, [row.contender for row, _ in bars])
    panel.invert_yaxis()
    panel.set_xlim(0, max(1e6 * seconds.high for _, seconds in bars) / SHARE)
    mode = f", memory in {case.mode} mode" if case.mode else ""
    panel.set_title(f"{case.title}: {case.shape}{mode}", loc="left", fontsize=9)
    panel.set_xlabel("us a call: the shorter, the faster", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def figures(row: Row, seconds: Figure, arithmetic: bool) -> str:
    """What stands at the end of a bar: time, speed and its share of the limit of the same rounds."""
    value, unit = (row.gflop_per_s, "GFLOP/s") if arithmetic else (row.gb_per_s, "GB/s")
    share, limit = (row.of_peak, "the peak") if arithmetic else (row.fraction, "the read limit")
    parts = [f"{scaled(seconds.median, 1e-6)} us"]
    if value:
        parts.append(f"{value:.1f} {unit}" + (f" ({share.median:.0%} of {limit})" if share else ""))
    if row.status == DISTURBED:
        parts.append("disturbed")
    return ", ".join(parts)
