"""build: a spec and a target -> a Library, with schedules from the tuning cache or the defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.ir import Schedule, Spec, Target
from kvgen.ir.plan import OPS
from kvgen.ir.schedule import Knob
from kvgen.library import Library
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.passes.verify import verify_record
from kvgen.targets import known_target
from kvgen.tune.space import load_space, spec_facts

TUNE_MODES = ("cache", "off", "quick", "full")
"""cache: use what is stored, never tune; off: default schedules; quick, full: tune what is missing."""


def build(
    spec: Spec | str | Path | Mapping[str, Any],
    target: str = "cpu",
    *,
    tune: str = "cache",
    schedule: Mapping[str, Mapping[str, Knob]] | None = None,
    checked: bool = True,
) -> Library:
    """Generate, compile and load the six ops of ``spec`` for ``target``.

    ``schedule`` pins knobs, e.g. ``{"decode": {"split_tokens": 64}}``. Raises ``SpecError``,
    ``UnsupportedError`` (before any compile) and ``ToolchainError``.
    """
    library = assemble(spec, target, tune=tune, schedule=schedule, checked=checked)
    library.prepare()
    return library


def assemble(
    spec: Spec | str | Path | Mapping[str, Any],
    target: str = "cpu",
    *,
    tune: str = "off",
    schedule: Mapping[str, Mapping[str, Knob]] | None = None,
    checked: bool = True,
    backend: Backend | None = None,
) -> Library:
    """The same library before anything is compiled: enough for source, plans and explanations."""
    if tune not in TUNE_MODES:
        raise ArgumentError(f"tune = {tune!r}: give one of {', '.join(TUNE_MODES)}")
    spec = spec if isinstance(spec, Spec) else load_spec(spec)
    resolved = resolve_target(target)
    backend = backend or backend_for(resolved)
    record = place(spec)
    verify_record(spec, record)
    pins = dict(schedule or {})
    unknown = sorted(set(pins) - set(OPS))
    if unknown:
        raise ArgumentError(f"schedule[{unknown[0]!r}]: no such op; the ops are {', '.join(OPS)}")
    chosen = {op: default_schedule(backend, op, spec, resolved, pins.get(op, {})) for op in OPS}
    if tune != "off":
        from kvgen.tune.choose import choose

        chosen |= choose(spec, record, resolved, backend, tune, pins, chosen)
    return Library(spec, record, resolved, backend, chosen, checked=checked)


def default_schedule(
    backend: Backend, op: str, spec: Spec, target: Target, pins: Mapping[str, Knob]
) -> Schedule:
    """The seed of the target, made to fit the spec, with pinned knobs.

    ``ArgumentError`` for a knob that does not exist or a pin that breaks a constraint.
    """
    space = load_space(backend.space(op))
    facts = spec_facts(spec, target)
    for knob, value in pins.items():
        if knob not in space.knobs:
            raise ArgumentError(
                f"schedule[{op!r}][{knob!r}]: no such knob; {op} has {', '.join(space.knobs) or 'none'}"
            )
        if type(value) is not type(space.knobs[knob][0]):
            raise ArgumentError(
                f"schedule[{op!r}][{knob!r}] = {value!r}: give for example {space.knobs[knob][0]!r}"
            )
    schedule = space.default(target, facts, pins)
    if not space.allows(schedule, facts):
        broken = [text for text in space.constraints if not space.holds(text, schedule, facts)]
        raise ArgumentError(f"schedule[{op!r}] = {dict(pins)}: breaks the constraint {broken[0]!r}")
    return schedule


def resolve_target(name: str) -> Target:
    """The target called ``name``; ``cpu``, ``cuda`` and ``hip`` stand for the device present."""
    if name == "cpu" or name.startswith("cpu-"):
        from kvgen.backends.cpu import isa

        row = isa.resolve_target(name)
        return dataclasses.replace(known_target(row.target), features=isa.default_features(row))
    if name in ("cuda", "hip"):
        from kvgen.backends.triton.launch_device import present_target

        return known_target(present_target(name))
    return known_target(name)


def backend_for(target: Target) -> Backend:
    """The backend of a target."""
    if target.backend == "cpu":
        from kvgen.backends.cpu.backend import CpuBackend

        return CpuBackend()
    if target.backend == "triton":
        from kvgen.backends.triton.backend import TritonBackend

        return TritonBackend()
    raise UnsupportedError(f"no backend {target.backend!r}")
