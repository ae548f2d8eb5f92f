"""Time limits follow what good candidates took."""

from __future__ import annotations

from kvgen.tune.limits import RACE, Limit, race_limit


def test_the_cap_holds_until_something_is_known() -> None:
    limit = Limit(2.0, 10.0, 60.0)
    assert limit.seconds == 60.0
    limit.took(0.01)
    assert limit.seconds == 2.0, "never below the floor"
    limit = Limit(2.0, 10.0, 60.0)
    limit.took(12.0)
    assert limit.seconds == 120.0, "a slow machine is given what it needs"
    limit.took(5.0)
    assert limit.seconds == 50.0, "the best so far sets it"
    limit.took(20.0)
    assert limit.seconds == 50.0


def test_a_race_is_given_what_its_launches_take() -> None:
    floor, factor, cap = RACE
    assert race_limit(None, 0.0, 1, 0.1, 5) >= cap
    quick = race_limit(1e-4, 0.1, 4, 0.1, 5)
    assert floor < quick < floor + 4 * factor
    assert race_limit(10.0, 0.1, 4, 0.1, 5) > factor * 4 * 5 * 10.0, "however slow a launch is"
