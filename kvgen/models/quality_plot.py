"""quality_plot: a report as KL against bits, a point for each kind of pages. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgen.bench.plot import OURS, need_plot, undated

if TYPE_CHECKING:
    from kvgen.models.quality import Report, Row

__all__ = ["draw", "need_plot"]

BITS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Ticks of the axis of bits: 1.5 times apart at most."""


def draw(report: Report, path: str) -> None:
    """Write the picture, for a path that ``need_plot`` accepts. What lost nothing has no place on it."""
    need_plot(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.5))
    rows = [row for row in report.rows if row.kl_nats > 0]
    for row in rows:
        panel.plot([row.bits, row.bits_at_context], [row.kl_nats] * 2, color=OURS, lw=0.8, alpha=0.5)
        panel.annotate(
            row.pages, (row.bits, row.kl_nats), xytext=(5, 4), textcoords="offset points", fontsize=8
        )
    panel.plot([row.bits for row in rows], [row.kl_nats for row in rows], "o", color=OURS)
    if rows:
        _axes(panel, rows)
    panel.set_xlabel(f"bits for each element; lines: with raw tokens, at {report.context}", fontsize=9)
    panel.set_ylabel("KL to f32 pages, nats", fontsize=9)
    panel.set_title(f"{report.model}: {report.tokens} tokens in contexts of {report.context}", fontsize=10)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata=undated(path))
    pyplot.close(figure)


def _axes(panel: Any, rows: Sequence[Row]) -> None:
    """Both logarithmic, with room enough around the points for two ticks or more."""
    from matplotlib import ticker

    bits = [value for row in rows for value in (row.bits, row.bits_at_context)]
    panel.set_xscale("log", base=2)
    panel.set_xlim(min(bits) / 1.5, max(bits) * 1.5)
    panel.xaxis.set_major_locator(ticker.FixedLocator(BITS))
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.set_yscale("log")
    panel.set_ylim(min(row.kl_nats for row in rows) / 2.5, max(row.kl_nats for row in rows) * 2.5)
    wide = max(row.kl_nats for row in rows) > 100 * min(row.kl_nats for row in rows)
    panel.yaxis.set_major_locator(ticker.LogLocator(10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    panel.yaxis.set_minor_formatter(ticker.NullFormatter())
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
