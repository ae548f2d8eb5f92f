"""Successive halving on made-up figures: who is measured how often, and what a failure does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.tune.halving import FINALISTS, halve


def test_the_worse_half_leaves_and_the_rest_is_measured_again() -> None:
    rounds: list[list[int]] = []

    def measure(level: int, left: Sequence[int]) -> dict[int, float]:
        assert level == len(rounds)
        rounds.append(list(left))
        return {i: float(i) for i in left}

    figures = halve([7, 3, 0, 5, 1, 6, 2, 4], measure)
    assert [sorted(r) for r in rounds] == [list(range(8)), [0, 1, 2, 3], [0, 1, 2]]
    assert figures == {i: float(i) for i in range(8)}


def test_the_last_round_counts() -> None:
    luck = {0: [1.0, 3.0, 3.0], 1: [2.0, 2.0, 2.0]}
    figures = halve(range(8), lambda level, left: {i: luck.get(i, [float(i + 3)] * 3)[level] for i in left})
    assert figures[0] == 3.0


@pytest.mark.parametrize("level", [0, 1])
def test_who_fails_has_no_figure(level: int) -> None:
    def measure(at: int, left: Sequence[int]) -> dict[int, float]:
        return {i: float(i) for i in left if (at, i) != (level, 0)}

    assert sorted(halve(range(8), measure)) == list(range(1, 8))


def test_all_failing_ends() -> None:
    assert halve([1, 2], lambda level, left: {}) == {}


@given(st.lists(st.floats(0.1, 10), max_size=70, unique=True))
def test_without_noise_the_best_are_measured_longest(costs: list[float]) -> None:
    seen: dict[float, int] = dict.fromkeys(costs, 0)

    def measure(level: int, left: Sequence[float]) -> dict[float, float]:
        for cost in left:
            seen[cost] += 1
        return {cost: cost for cost in left}

    halve(costs, measure)
    ranked = sorted(costs)
    assert all(seen[a] >= seen[b] for a, b in itertools.pairwise(ranked))
    assert len({seen[cost] for cost in ranked[:FINALISTS]}) <= 1, "finalists share the last round"
