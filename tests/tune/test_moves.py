"""Pattern moves: one knob, one step, nothing forbidden, nothing twice."""

from __future__ import annotations

from kvgen.resolve import resolve_target
from kvgen.tune.moves import neighbours
from kvgen.tune.space import load_space, spec_facts
from tests.support.faults import small

TARGET = resolve_target("cpu")
SPACE = load_space("cpp/decode")
FACTS = spec_facts(small(), TARGET)
CENTRE = SPACE.default(TARGET, FACTS)


def test_a_neighbour_is_one_step_away_and_allowed() -> None:
    found = list(neighbours(SPACE, FACTS, CENTRE, (), {}))
    assert found
    for other in found:
        (knob,) = (k for k in SPACE.knobs if other[k] != CENTRE[k])
        values = SPACE.knobs[knob]
        assert abs(values.index(other[knob]) - values.index(CENTRE[knob])) == 1
        assert SPACE.allows(other, FACTS)
    # Every allowed schedule at that distance, and no more.
    near = [
        s
        for s in SPACE.candidates(FACTS)
        if sum(abs(v.index(s[k]) - v.index(CENTRE[k])) for k, v in SPACE.knobs.items()) == 1
    ]
    assert sorted(map(str, found)) == sorted(map(str, near))


def test_what_was_tried_or_pinned_stays_away() -> None:
    every = list(neighbours(SPACE, FACTS, CENTRE, (), {}))
    assert list(neighbours(SPACE, FACTS, CENTRE, every[:2], {})) == every[2:]
    pinned = list(neighbours(SPACE, FACTS, CENTRE, (), {"tile": CENTRE["tile"]}))
    assert pinned == [s for s in every if s["tile"] == CENTRE["tile"]]
    assert not list(neighbours(SPACE, FACTS, CENTRE, every, {}))


def test_a_pin_that_is_no_value_of_the_space_does_not_move() -> None:
    centre = CENTRE.replace(split_tokens=777)
    found = list(neighbours(SPACE, FACTS, centre, (), {"split_tokens": 777}))
    assert found and {s["split_tokens"] for s in found} == {777}


def test_the_canonical_order_is_that_of_the_space() -> None:
    schedules = list(SPACE.candidates(FACTS))
    assert sorted(schedules, key=SPACE.order) == schedules
    assert SPACE.order(CENTRE.replace(split_tokens=777)) > SPACE.order(CENTRE.replace(split_tokens=4096))
