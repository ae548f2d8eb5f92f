"""build: a spec and a target -> a Library, with schedules from the tuning cache or the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, brief
from kvgen.ir import Schedule, Spec
from kvgen.ir.plan import OPS
from kvgen.ir.schedule import Knob
from kvgen.ir.verify import verify_record
from kvgen.library import Library
from kvgen.names import told
from kvgen.passes.place import place
from kvgen.passes.preset import resolve as resolve_preset
from kvgen.passes.validate import load_spec
from kvgen.resolve import backend_for, resolve_target
from kvgen.tune.defaults import default_schedule
from kvgen.tune.pins import check_pins

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
    if not isinstance(tune, str) or tune not in TUNE_MODES:
        raise ArgumentError(f"tune = {brief(tune)}: give one of {', '.join(TUNE_MODES)}")
    spec = spec if isinstance(spec, Spec) else load_spec(spec)
    if not isinstance(target, str):
        raise ArgumentError(f"target = {brief(target)}: give the name of a target, such as 'cpu' or 'sm_90'")
    resolved = resolve_target(target)
    backend = backend or backend_for(resolved)
    spec = resolve_preset(spec, resolved)
    record = place(spec)
    verify_record(spec, record)
    pins = _pins(schedule)
    unknown = [op for op in pins if op not in OPS]
    if unknown:
        hint = told(unknown[0], OPS)
        raise ArgumentError(f"schedule[{brief(unknown[0])}]: no such op; {hint}The ops are {', '.join(OPS)}")
    chosen = {op: default_schedule(backend, op, spec, resolved, pins.get(op, {})) for op in OPS}
    for op, knobs in pins.items():
        check_pins(backend, op, spec, record, resolved, chosen[op], knobs)
    workloads: dict[str, dict[str, Schedule]] = {}
    if tune != "off":
        from kvgen.tune.choose import choose

        tuned = choose(spec, record, resolved, backend, tune, pins, chosen)
        chosen, workloads = chosen | tuned.schedules, tuned.workloads
    return Library(spec, record, resolved, backend, chosen, checked=checked, workloads=workloads)


def _pins(schedule: Any) -> dict[Any, Mapping[str, Knob]]:
    """``schedule`` as a dict of dicts."""
    if schedule is None:
        return {}
    if not isinstance(schedule, Mapping):
        raise ArgumentError(f"schedule = {brief(schedule)}: give a mapping, {{'decode': {{knob: value}}}}")
    for op, knobs in schedule.items():
        if not isinstance(knobs, Mapping):
            raise ArgumentError(f"schedule[{brief(op)}] = {brief(knobs)}: give a mapping of knobs to values")
    return dict(schedule)
