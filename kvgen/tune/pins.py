"""pins: a knob that somebody fixed is used as given, or refused with what would work."""

from __future__ import annotations

from collections.abc import Mapping

from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, UnsupportedError, brief
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import KernelPlan
from kvgen.ir.schedule import Knob
from kvgen.passes.abi import VARIANTS

OPEN = {
    "cpu": ("tile", "split_tokens", "heads", "rows", "parallel_rows"),
    "triton": ("split_tokens", "num_stages"),
}
"""Knobs that may have other values than those the tuner tries, by backend."""

MOST = 1 << 20
"""Largest value of such a knob."""

TAKEN = {"tile": "TILE", "split_tokens": "SPLIT", "heads": "HEADS", "row_block": "ROW_BLOCK"}
"""Constant of a CPU kernel that holds what became of a knob."""


def ignored(
    backend: Backend, op: str, spec: Spec, record: PageRecord, target: Target, schedule: Schedule
) -> tuple[str, ...]:
    """The knobs that no kernel of ``op`` has a use for; none where ``schedule`` cannot be planned."""
    try:
        plans = _plans(backend, op, spec, record, target, schedule)
    except UnsupportedError:
        return ()
    return tuple(knob for knob in schedule if all(knob in plan.ignored for plan in plans))


def refuse_value(op: str, knob: str, value: Knob, choices: tuple[Knob, ...], target: Target) -> None:
    """Raise ``ArgumentError`` for a value that no kernel of ``op`` can be made with."""
    if value in choices:
        return
    if isinstance(value, bool) or not isinstance(value, int) or knob not in OPEN[target.backend]:
        works = ", ".join(map(repr, choices))
        raise ArgumentError(f"{_name(op, knob, value)}: give one of {works}")
    if not 1 <= value <= MOST:
        raise ArgumentError(f"{_name(op, knob, value)}: give 1 to {MOST}, for example {choices[0]!r}")


def check_pins(
    backend: Backend,
    op: str,
    spec: Spec,
    record: PageRecord,
    target: Target,
    schedule: Schedule,
    pins: Mapping[str, Knob],
) -> None:
    """Raise ``ArgumentError`` where a kernel of ``op`` does not use a pin as given."""
    if not pins:
        return
    plans = _plans(backend, op, spec, record, target, schedule)
    for knob, value in pins.items():
        if all(knob in plan.ignored for plan in plans):
            raise ArgumentError(
                f"{_name(op, knob, value)}: {op} of this spec on {target.name} is the same whatever its "
                f"value; leave it out"
            )
        for plan in plans:
            taken = _taken(plan, knob)
            if taken is not None and taken != value:
                raise ArgumentError(
                    f"{_name(op, knob, value)}: the kernel would take {taken} "
                    f"({_why(knob, spec, schedule)}); give {taken}"
                )


def _plans(
    backend: Backend, op: str, spec: Spec, record: PageRecord, target: Target, schedule: Schedule
) -> list[KernelPlan]:
    return [backend.plan(op, spec, record, schedule, target, variant) for variant in VARIANTS[op]]


def _taken(plan: KernelPlan, knob: str) -> int | float | None:
    """What a CPU kernel of attention makes of a knob; None where it takes what it is given."""
    if plan.target.backend != "cpu" or plan.op not in ("decode", "prefill"):
        return None
    constants = {constant.name: constant.value for constant in plan.constants}
    if knob == "rows":
        return constants["Q_TILE"] * plan.spec.attention.group
    return constants.get(TAKEN.get(knob, ""))


def _why(knob: str, spec: Spec, schedule: Schedule) -> str:
    if knob == "tile":
        return f"tiles and pages of {spec.cache.page_size} tokens divide each other"
    if knob == "split_tokens":
        return "whole tiles"
    return f"whole queries of {spec.attention.group} heads" if knob == "rows" else str(schedule)


def _name(op: str, knob: str, value: Knob) -> str:
    return f"schedule[{op!r}][{knob!r}] = {brief(value)}"
