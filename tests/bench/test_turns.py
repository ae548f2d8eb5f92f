"""Turns: which samples count, how many there are, in which order; with a clock and a counter of our own."""

from __future__ import annotations

import pytest

from kvgen.bench.turns import LEAST, SAMPLE_S, TRIES, WARM_UP, Calls, Lane, plan, take_turns


class World:
    """A clock that moves only when somebody works, and what threads have waited."""

    def __init__(self) -> None:
        self.now, self.waited_ns = 0.0, 0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now

    def waited(self) -> int:
        return self.waited_ns

    def lane(self, name: str, seconds: float, waits: object = ()) -> Lane:
        """A lane whose sample number i waits ``waits[i]`` of its time; later ones do not."""
        left = list(waits)  # type: ignore[call-overload]

        def measure() -> float:
            self.order.append(name)
            self.now += seconds
            self.waited_ns += int(1e9 * seconds * (left.pop(0) if left else 0.0))
            return seconds

        return Lane(name, measure, cost_s=seconds)

    def run(self, *lanes: Lane, rounds: int = 10, seconds: float = 100.0, **more: object) -> int:
        return take_turns(
            lanes,
            rounds=rounds,
            seconds=seconds,
            clock=self.clock,
            waited=self.waited,
            **more,  # type: ignore[arg-type]
        )


def test_a_sample_counts_below_one_percent_of_waiting() -> None:
    world = World()
    lane = world.lane("a", 0.01, [0.0, 0.009, 0.011])
    world.run(lane, rounds=3)
    assert sorted(lane.samples) == [0, 1, 2]
    assert lane.dropped == 1  # and the next try of the same round counted


def test_what_is_always_disturbed_has_no_samples_and_says_how_many_were_dropped() -> None:
    world = World()
    busy, calm = world.lane("busy", 0.01, [0.5] * 1000), world.lane("calm", 0.01)
    rounds = world.run(busy, calm, rounds=5, seconds=1.0)
    assert busy.samples == {}
    assert busy.dropped == TRIES * rounds
    assert len(calm.samples) == rounds > 5  # went on while there was time


def test_where_waits_are_not_counted_every_sample_counts() -> None:
    world = World()
    lane = world.lane("a", 0.01, [0.9] * 10)
    take_turns([lane], rounds=4, seconds=9.0, clock=world.clock, waited=lambda: None)
    assert (len(lane.samples), lane.dropped) == (4, 0)


def test_each_round_has_every_lane_once_in_a_shuffled_order() -> None:
    world = World()
    lanes = [world.lane(name, 0.01) for name in "abcd"]
    world.run(*lanes, rounds=20)
    rounds = ["".join(world.order[i : i + 4]) for i in range(0, 80, 4)]
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len(set(rounds)) > 5
    again = World()
    again.run(*[again.lane(name, 0.01) for name in "abcd"], rounds=20)
    assert again.order == world.order  # the same seed, the same order


def test_a_slow_lane_gets_fewer_samples_within_the_budget() -> None:
    world = World()
    quick, slow = world.lane("quick", 0.01), world.lane("slow", 1.0)
    world.run(quick, slow, rounds=20, seconds=6.0)
    assert len(quick.samples) == 20
    assert LEAST <= len(slow.samples) <= 6
    assert world.now <= 6.0 * 1.5


def test_a_lane_slower_than_the_whole_budget_runs_once() -> None:
    world = World()
    quick, slow = world.lane("quick", 0.01), world.lane("slow", 30.0)
    world.run(quick, slow, rounds=10, seconds=5.0)
    assert len(slow.samples) == 1
    assert len(quick.samples) >= LEAST


def test_the_plan_gives_unused_time_to_others() -> None:
    lanes = [Lane("a", lambda: 0.0, cost_s=0.001), Lane("b", lambda: 0.0, cost_s=0.5)]
    plan(lanes, rounds=10, seconds=5.1)
    assert [lane.share for lane in lanes] == [1.0, 1.0]


def test_short_calls_are_made_many_times_for_a_sample() -> None:
    world, turns = World(), []

    def call(turn: int) -> None:
        turns.append(turn)
        world.now += 1e-5

    calls = Calls(call, world.clock)
    calls.warm_up()
    assert calls.reps == pytest.approx(SAMPLE_S / 1e-5, abs=1)
    assert calls() == pytest.approx(1e-5)
    assert turns == list(range(WARM_UP + calls.reps))  # memory goes on rotating from one sample to the next
    calls()
    assert turns[-1] == WARM_UP - 1 + 2 * calls.reps


def test_threads_that_rest_are_woken_by_a_call_that_does_not_count() -> None:
    world, rests = World(), []

    def call(turn: int) -> None:
        world.now += 5.0 if rests and turn == WARM_UP else 0.004

    calls = Calls(call, world.clock, wake=True)
    calls.warm_up()
    lane = Lane("a", calls)
    take_turns(
        [lane], rounds=1, seconds=9.0, clock=world.clock, waited=lambda: 0, rest=lambda: rests.append(1)
    )
    assert lane.samples[0] == pytest.approx(0.004)
    assert len(rests) >= 1
