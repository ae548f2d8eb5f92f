"""The pictures: who is faster shows, every bar has its figures, every axis its ticks."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvgen.bench import plot
from kvgen.bench.report import DISTURBED, Report
from kvgen.models import quality_plot
from kvgen.models.quality import Report as Quality
from kvgen.models.quality import Row
from tests.support.bench_reports import recorded

pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[pyplot.Figure]:
    """The figures that were drawn, still open."""
    drawn: list[pyplot.Figure] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    return drawn


def test_the_faster_stands_first_and_every_bar_has_its_figures(
    panels: list[pyplot.Figure], tmp_path: Path
) -> None:
    report = recorded(4, step=1.4)
    rows = list(report.cases[0].rows)
    rows[1] = dataclasses.replace(rows[1], status=DISTURBED)
    case = dataclasses.replace(report.cases[0], rows=tuple(rows[::-1]))
    plot.draw(dataclasses.replace(report, cases=(case,)), str(tmp_path / "bars.svg"))
    panel = panels[0].axes[0]
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert names == [row.contender for row in rows] and panel.yaxis_inverted()
    lengths = [bar.get_width() for bar in panel.patches]
    assert lengths == sorted(lengths) and lengths[0] == pytest.approx(123.45)
    texts = [text.get_text() for text in panel.texts]
    assert texts[0] == "123 us, 17.7 GB/s (93% of the read limit)"
    assert texts[1].endswith("% of the read limit), disturbed")
    assert "shorter, the faster" in panel.get_xlabel()
    assert panels[0].get_suptitle().startswith("cpu-avx512: Some CPU, 2 threads")
    edge = panels[0].get_window_extent().x1
    renderer = panels[0].canvas.get_renderer()
    assert all(text.get_window_extent(renderer).x1 <= edge for text in panel.texts)


def test_a_prefill_tells_arithmetic(panels: list[pyplot.Figure], tmp_path: Path) -> None:
    plot.draw(recorded(1, peaks=True), str(tmp_path / "bars.svg"))
    assert panels[0].axes[0].texts[0].get_text() == "123 us, 812.0 GFLOP/s (50% of the peak)"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_each_suffix_and_the_same_bytes_again(suffix: str, tmp_path: Path) -> None:
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    report: Report = recorded(2)
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        plot.draw(report, str(file))
    assert files[0].read_bytes().startswith(begins)
    if suffix != ".svg":  # whose ids are random
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    "points", [[(16, 1e-6), (10, 3e-4)], [(8.5, 2e-4)], [(2.25, 0.4), (4.5, 0.02), (9, 3e-4), (16, 1e-6)]]
)
def test_the_quality_plot_has_ticks(
    points: list[tuple[float, float]], panels: list[pyplot.Figure], tmp_path: Path
) -> None:
    rows = tuple(Row(f"{bits}", kl, kl, 1.0, 9.0, bits, bits * 1.1) for bits, kl in points)
    quality_plot.draw(Quality("tiny", 100, 64, 64, 9.0, rows), str(tmp_path / "loss.svg"))
    panel = panels[0].axes[0]
    for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
        ticks = [at for at in axis.get_majorticklocs() if low <= at <= high]
        assert len(ticks) >= 2
        labels = [label.get_text() for label in axis.get_majorticklabels()]
        assert all(re.fullmatch(r"[\d.e+\N{MINUS SIGN}]+", label) for label in labels)
