"""moves: the schedules one step away from a good one, which a model need not have thought of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kvgen.ir import Schedule
from kvgen.ir.schedule import Knob
from kvgen.tune.space import Space


def neighbours(
    space: Space,
    facts: Mapping[str, Knob],
    centre: Schedule,
    tried: Collection[Schedule],
    pins: Mapping[str, Knob],
) -> Iterator[Schedule]:
    """Allowed schedules that differ from ``centre`` in one knob by one step, and were not tried.

    A knob that is pinned, or whose value is none of the space's (a pin of another kind), does not move.
    """
    for knob, values in space.knobs.items():
        if knob in pins or centre[knob] not in values:
            continue
        at = values.index(centre[knob])
        for step in (at - 1, at + 1):
            if not 0 <= step < len(values):
                continue
            found = centre.replace(**{knob: values[step]})
            if found not in tried and space.allows(found, facts):
                yield found
