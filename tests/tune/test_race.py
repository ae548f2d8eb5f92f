"""The race and the duel, on contenders whose times are made up; nothing here depends on a clock's speed."""

from __future__ import annotations

import itertools

import pytest

from kvgen.tune import race as module
from kvgen.tune.race import Duel, duel, race


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that contender i takes, on a clock that only they move."""
    now = [0.0]
    prices = [1.0, 2.0, 1.05]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: round(now[0] * 1e9))
    monkeypatch.setattr(module, "waited_ns", lambda: 0)
    monkeypatch.setattr(module, "_clock", now, raising=False)
    return prices


def runs(prices: list[float], calls: list[int]) -> list[module.Run]:
    def make(index: int) -> module.Run:
        def run(turn: int) -> None:
            calls.append(index)
            module._clock[0] += prices[index]  # type: ignore[attr-defined]

        return run

    return [make(i) for i in range(len(prices))]


def test_the_median_of_each_is_found(costs: list[float]) -> None:
    calls: list[int] = []
    assert race(runs(costs, calls), seconds=0.0) == pytest.approx(costs)
    assert [calls.count(i) for i in range(3)] == [2 + 3] * 3, (
        "twice to warm up, and the least number of rounds"
    )


def test_contenders_take_turns(costs: list[float]) -> None:
    calls: list[int] = []
    race(runs(costs[:1] * 3, calls), seconds=1e9, most_rounds=6)
    rounds = [tuple(calls[6 + 3 * r : 9 + 3 * r]) for r in range(6)]
    assert all(sorted(r) == [0, 1, 2] for r in rounds)
    assert len(set(rounds)) == 3, "who goes first changes"


def test_disturbed_samples_are_left_out(costs: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    # Every second sample a thread waited for a second, and the clock shows it.
    waits = itertools.accumulate(0 if i % 4 else 10**9 for i in itertools.count(1))
    monkeypatch.setattr(module, "waited_ns", lambda: next(waits))
    slow = lambda turn: module._clock.__setitem__(  # type: ignore[attr-defined]  # noqa: E731
        0,
        module._clock[0] + (5.0 if next(ticks) % 2 else 1.0),  # type: ignore[attr-defined]
    )
    (seconds,) = race([slow], seconds=1e9, most_rounds=20)
    assert seconds == 1.0


def test_a_duel_alternates_and_finds_the_ratio(costs: list[float]) -> None:
    calls: list[int] = []
    found = duel(*runs([1.0, 0.5], calls), seconds=1e9, most=8)
    assert found.ratio == pytest.approx(0.5)
    assert found.faster and not found.slower
    assert calls[2:6] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("found", "faster", "slower"),
    [
        (Duel(1.0, 0.5, 1.0, 1.0, True), False, False),
        (Duel(0.97, 0.9, 1.0, 0.97, True), True, False),
        (Duel(0.97, 0.5, 1.0, 0.97, True), False, False),  # by luck
        (Duel(0.9, 0.9, 1.0, 0.9, False), False, False),  # a busy machine
        (Duel(1.2, 0.1, 1.0, 1.2, True), False, True),
        (Duel(1.02, 0.2, 1.0, 1.02, True), False, True),
        (Duel(1.02, 0.5, 1.0, 1.02, True), False, False),
        (Duel(1.06, 0.5, 1.0, 1.06, False), False, True),  # a busy machine is no excuse
    ],
)
def test_a_verdict_needs_more_than_noise(found: Duel, faster: bool, slower: bool) -> None:
    assert (found.faster, found.slower) == (faster, slower)
