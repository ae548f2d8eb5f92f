"""The schedule of an op that was not tuned: the target's seed, made to fit the spec, with pinned knobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, brief
from kvgen.ir import Schedule, Spec, Target
from kvgen.ir.schedule import Knob
from kvgen.names import told
from kvgen.tune.nearest import ways
from kvgen.tune.pins import refuse_value
from kvgen.tune.space import Space, load_space, space_of, spec_facts


def default_schedule(
    backend: Backend, op: str, spec: Spec, target: Target, pins: Mapping[str, Knob]
) -> Schedule:
    """``default_in`` the space of the backend's template of ``op``."""
    return default_in(load_space(backend.space(op)), op, spec, target, pins)


def default_in(space: Space, op: str, spec: Spec, target: Target, pins: Mapping[str, Knob]) -> Schedule:
    """The seed of the target, made to fit the spec, with pinned knobs.

    ``ArgumentError`` for a knob that does not exist or a pin that breaks a constraint.
    """
    facts = spec_facts(spec, target)
    for knob, value in pins.items():
        if knob not in space.knobs:
            raise ArgumentError(
                f"schedule[{op!r}][{brief(knob)}]: no such knob; {told(knob, space.knobs)}"
                f"{op} has {', '.join(space.knobs) or 'none'}"
            )
        if type(value) is not type(space.knobs[knob][0]):
            raise ArgumentError(
                f"schedule[{op!r}][{knob!r}] = {brief(value)}: give for example {space.knobs[knob][0]!r}"
            )
        refuse_value(op, knob, value, space.knobs[knob], target)
    schedule = space.default(target, facts, pins, lambda: ways(spec, lambda other: _fits(other, target)))
    if not space.allows(schedule, facts):
        raise ArgumentError(f"schedule[{op!r}] = {brief(dict(pins))}: {_blame(space, facts, pins)}")
    return schedule


def _blame(space: Space, facts: Mapping[str, Knob], pins: Mapping[str, Knob]) -> str:
    """The constraint that these pins break whatever the other knobs are, or that they break together."""
    free = [name for name in space.knobs if name not in pins]
    for text in space.constraints:
        alone = replace(space, constraints=(text,))
        if not any(True for _ in alone.candidates(facts, pins)):
            return f"breaks the constraint {text!r}"
    return f"no values of {', '.join(free)} fit it; pin fewer knobs"


def _fits(spec: Spec, target: Target) -> bool:
    """Whether attention over a spec has schedules, in each op: one alone is no use."""
    facts = spec_facts(spec, target)
    return all(space_of(op, target).fits(facts) for op in ("decode", "prefill"))
