"""quality_plot: a report as KL against bits, a point for each kind of pages. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.bench.plot import OURS, need_plot

if TYPE_CHECKING:
    from kvgen.models.quality import Report

__all__ = ["draw", "need_plot"]


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
        panel.set_yscale("log")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel(f"bits for each element; lines: with raw tokens, at {report.context}", fontsize=9)
    panel.set_ylabel("KL to f32 pages, nats", fontsize=9)
    panel.set_title(f"{report.model}: {report.tokens} tokens in contexts of {report.context}", fontsize=10)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)
