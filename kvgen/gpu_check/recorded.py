"""recorded: a lowered kernel as data: all that launching and checking it ask of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvgen.ir import Schedule, Spec, Target
from kvgen.ir.plan import Arg, Constant, KernelPlan
from kvgen.passes.plan_triton_parts import Entry, Param
from kvgen.targets import known_target


@dataclass(frozen=True)
class Recorded:
    """What ``KernelPlan`` says, as far as ``launch`` and the checks ask."""

    op: str
    variant: str
    spec: Spec
    target: Target
    schedule: Schedule
    args: tuple[Arg, ...]
    constants: tuple[Constant, ...]
    answers: Mapping[str, Any]

    def constant(self, name: str) -> int | float:
        """Value of the constant ``name``."""
        return next(c.value for c in self.constants if c.name == name)


def to_json(plan: KernelPlan) -> dict[str, Any]:
    """A plan as plain JSON data. Answers that only a template asks for (tiles, texts) are left out."""
    plain = {
        name: value for name, value in plan.answers.items() if isinstance(value, bool | int | float | str)
    }
    return {
        "op": plan.op,
        "variant": plan.variant,
        "target": plan.target.name,
        "schedule": plan.schedule.to_dict(),
        "args": [asdict(arg) for arg in plan.args],
        "constants": [asdict(constant) for constant in plan.constants],
        "answers": plain,
        "aligned": sorted(plan.answers["aligned"]),
        "kernels": [asdict(entry) for entry in plan.answers["kernels"]],
    }


def from_json(data: Mapping[str, Any], spec: Spec) -> Recorded:
    """The inverse of ``to_json`` for the spec that the plan was made for."""
    kernels = tuple(
        Entry(**{**entry, "params": tuple(Param(**param) for param in entry["params"])})
        for entry in data["kernels"]
    )
    return Recorded(
        data["op"],
        data["variant"],
        spec,
        known_target(data["target"]),
        Schedule.of(data["schedule"]),
        tuple(Arg(**arg) for arg in data["args"]),
        tuple(Constant(**constant) for constant in data["constants"]),
        {**data["answers"], "aligned": frozenset(data["aligned"]), "kernels": kernels},
    )
