"""Stats, waits and modes: medians of pairs, what Linux counts, and which rounds belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.bench.mode import judge
from kvgen.bench.stats import figure, paired
from kvgen.bench.waits import steal_ticks, waited_ns


def test_median_and_quartiles() -> None:
    found = figure([5.0, 1.0, 2.0, 3.0, 4.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.count) == (3.0, 2.0, 4.0, 5)
    assert found.spread == pytest.approx(1 / 3)


def test_few_samples() -> None:
    assert figure([]) is None
    one = figure([2.0])
    assert one is not None and (one.median, one.spread) == (2.0, 0.0)


def test_a_ratio_is_the_median_of_pairs_of_one_round() -> None:
    """A machine that is half as fast in every other round: both medians move, the pairs do not."""
    ours = {turn: 1.0 if turn % 2 else 2.0 for turn in range(9)}
    theirs = {turn: 3.0 * value for turn, value in ours.items() if turn != 4}
    found = paired(theirs, ours)
    assert found is not None and (found.median, found.spread, found.count) == (3.0, 0.0, 8)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_waits_are_summed_over_threads(tmp_path: Path) -> None:
    for thread, text in (("1", "900 250 7"), ("2", "900 50 7"), ("3", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "4").mkdir()  # ended meanwhile
    assert waited_ns(tmp_path) == 300


def test_a_kernel_that_counts_no_waits_is_told_apart_from_no_waits(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert waited_ns(tmp_path) is None
    assert waited_ns(tmp_path / "absent") is None


def test_time_of_the_hypervisor(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 0 20 60 0 0 0 10 0 0\ncpu0 1 2\n")
    assert steal_ticks(stat) == (10, 100)
    assert steal_ticks(tmp_path / "absent") is None


def test_two_threads_have_a_mode_and_its_rounds() -> None:
    one = dict.fromkeys(range(6), 30e9)
    many = {0: 37e9, 1: 36e9, 2: 60e9, 3: 38e9, 5: 37e9}
    found = judge(many, one, 2)
    assert (found.name, found.others) == ("slow", {2})
    assert found.scaling == pytest.approx(37 / 30)
    assert judge(dict.fromkeys(many, 60e9), one, 2).name == "fast"


def test_other_numbers_of_threads_have_none() -> None:
    assert judge({}, {}, 1).name is None
    eight = judge({0: 90e9}, {0: 30e9}, 8)
    assert (eight.name, eight.scaling, eight.others) == (None, 3.0, frozenset())
