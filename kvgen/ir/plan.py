"""KernelPlan: the fully lowered kernel. A template prints it and decides nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvgen.ir.record import PageRecord
from kvgen.ir.schedule import Schedule
from kvgen.ir.spec import Spec
from kvgen.ir.target import Target

if TYPE_CHECKING:
    from kvgen.passes.address import Address

OPS = ("append", "decode", "prefill", "merge", "copy", "gather")
"""The ops of a cache, in the order in which people meet them."""


@dataclass(frozen=True)
class Arg:
    """One argument of a kernel, in ABI order."""

    name: str
    kind: str
    """``ptr``, ``i64`` or ``f64`` (f32 in Triton)."""
    dtype: str = ""
    """Element type behind a pointer: a storage type, ``i32``, ``i64`` or ``u8``."""
    doc: str = ""
    """Shape and meaning, printed beside the declaration."""


@dataclass(frozen=True)
class Constant:
    """A named integer or float at the top of the rendered source."""

    name: str
    value: int | float
    doc: str = ""


@dataclass(frozen=True)
class Part:
    """A range of head_dim handled as one tile: 72 = 64 + 8."""

    start: int
    """First element."""
    width: int
    """Elements of the tile (what the hardware works on)."""
    valid: int
    """Elements that exist; below ``width`` in a padded tail."""


@dataclass(frozen=True)
class Fact:
    """Something the kernel rests on, and why it holds."""

    claim: str
    reason: str


def entry_name(
    op: str, variant: str, spec: Spec, target: str, features: Iterable[str], schedule: Schedule
) -> str:
    """The symbol of a kernel: another one for whatever decides what it computes."""
    text = "|".join((spec.hash, target, *features, str(schedule), variant))
    return f"kvgen_{op}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class KernelPlan:
    """Everything a template needs, decided."""

    op: str
    """One of ``OPS``."""
    variant: str
    """What distinguishes two kernels of one op, e.g. the type of append's input; often empty."""
    template: str
    """Path of the template under ``templates/``."""
    spec: Spec
    target: Target
    schedule: Schedule
    record: PageRecord
    args: tuple[Arg, ...]
    constants: tuple[Constant, ...]
    addresses: Mapping[str, Address]
    """Simplified address of each plane, by plane name."""
    facts: tuple[Fact, ...] = ()
    answers: Mapping[str, Any] = field(default_factory=dict)
    """Decided answers to what the template asks: parts, fold sites, mask kinds, helper texts."""

    ignored: tuple[str, ...] = ()
    """Knobs of the schedule that this kernel has no use for: it is the same whatever their value."""

    @property
    def stated(self) -> Schedule:
        """The knobs that decide something, for the header."""
        return Schedule.of({k: v for k, v in self.schedule.to_dict().items() if k not in self.ignored})

    @property
    def entry(self) -> str:
        """Name of the kernel's entry point: unique for what it computes and how."""
        target = self.target
        return entry_name(self.op, self.variant, self.spec, target.name, target.features, self.schedule)

    def constant(self, name: str) -> int | float:
        """Value of the constant ``name``."""
        return next(c.value for c in self.constants if c.name == name)
