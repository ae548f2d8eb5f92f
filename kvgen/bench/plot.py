"""plot: a report as bars of GB/s against the read limit, one panel a case. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgen.bench.report import DISTURBED, CaseReport, Report, Row
from kvgen.errors import ArgumentError, ToolchainError
from kvgen.models.extras import installed

SUFFIXES = (".png", ".svg")

OURS, THEIRS, LIMIT = "#1f6f8b", "#b9c4c9", "#c0392b"


def need_plot(path: str) -> None:
    """Raise where ``draw`` could not: another suffix, no such folder, no matplotlib."""
    place = Path(path)
    if place.suffix not in SUFFIXES:
        raise ArgumentError(f"--plot {path}: give a name that ends in {' or '.join(SUFFIXES)}")
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
    figure.suptitle(f"{facts.cpu}, {facts.threads} thread{plural}, kvgen {facts.kvgen}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)


def _bars(case: CaseReport) -> list[Row]:
    return [row for row in case.rows if row.seconds is not None and row.gb_per_s is not None]


def _panel(panel: Any, case: CaseReport) -> None:
    """Bars of one case, whiskers from quartile to quartile, and the limits as lines."""
    rows = _bars(case)[::-1]
    prefill = bool(case.peaks)
    speeds = [(row.gflop_per_s if prefill else row.gb_per_s) or 0.0 for row in rows]
    spans = [_span(row, speed) for row, speed in zip(rows, speeds, strict=True)]
    colours = [OURS if row.spec else THEIRS for row in rows]
    names = [row.contender + (" (disturbed)" if row.status == DISTURBED else "") for row in rows]
    panel.barh(names, speeds, xerr=list(zip(*spans, strict=True)), color=colours, error_kw={"lw": 0.8})
    limits = [limit.bytes_per_s for limit in case.limits if limit.bytes_per_s]
    for value in case.peaks.values() if prefill else limits:
        panel.axvline(value.median / 1e9, color=LIMIT, lw=1, ls="--")
    panel.set_title(f"{case.title}{f', {case.mode} mode' if case.mode else ''}", loc="left", fontsize=9)
    unit = (
        "GFLOP/s; dashed: peak from registers" if prefill else "GB/s; dashed: read limit of the same memory"
    )
    panel.set_xlabel(unit, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _span(row: Row, speed: float) -> tuple[float, float]:
    """From the speed down to that of the slower quartile, and up to that of the faster one."""
    if row.seconds is None:
        return 0.0, 0.0
    slow, fast = (speed * row.seconds.median / seconds for seconds in (row.seconds.high, row.seconds.low))
    return speed - slow, fast - speed
