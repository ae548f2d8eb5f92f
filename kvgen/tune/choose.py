"""choose: the schedules of a library, from the tuning cache or by tuning what is missing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgen.backends.protocol import Backend
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.schedule import Knob
from kvgen.tune import store
from kvgen.tune.key import key_of
from kvgen.tune.space import load_space, spec_facts


class UntunedWarning(UserWarning):
    """Default or outdated schedules are in use; results are right, speed may not be."""


BY_WORKLOAD = ("decode",)
"""Ops whose workloads may have schedules of their own in one library."""


@dataclass
class Chosen:
    """The schedules of a library."""

    schedules: dict[str, Schedule] = field(default_factory=dict)
    """By op, for the ops that have something better than their default."""
    workloads: dict[str, dict[str, Schedule]] = field(default_factory=dict)
    """By op and bucket, where the winners of buckets differ; all give the same bits."""

    def take(
        self, op: str, schedule: Schedule, buckets: Mapping[str, Schedule], pins: Mapping[str, Knob]
    ) -> None:
        """Use a winner for ``op``, and those of single buckets that keep to the pins."""
        self.schedules[op] = schedule
        kept = {n: s for n, s in buckets.items() if all(s[knob] == value for knob, value in pins.items())}
        if op in BY_WORKLOAD and any(other != schedule for other in kept.values()):
            self.workloads[op] = kept


def choose(
    spec: Spec,
    record: PageRecord,
    target: Target,
    backend: Backend,
    mode: str,
    pins: Mapping[str, Mapping[str, Knob]],
    defaults: Mapping[str, Schedule],
) -> Chosen:
    """Schedules for the ops that have something better than their default.

    ``mode``: ``cache`` never tunes: the stored winner, else the default, with one warning for all; ``quick``
    and ``full`` tune what is missing first, and tell on stderr how far they are. The interpreter is never
    tuned: its times say nothing.
    """
    found = Chosen()
    if target.interpreted:
        return found
    if mode in ("quick", "full"):
        from kvgen.tune.telling import lines
        from kvgen.tune.tuner import tune_ops

        report = tune_ops(
            spec, record, target, backend, effort=mode, pins=pins, ops=tuple(defaults),
            progress=lines(spec.name, target.name),
        )  # fmt: skip
        for done in report.ops:
            buckets = {row.bucket: row.schedule for row in done.buckets}
            found.take(done.op, done.winner, buckets, pins.get(done.op, {}))
        return found
    facts = spec_facts(spec, target)
    missing, stale = [], []
    for op, default in defaults.items():
        space = load_space(backend.space(op))
        if not space.knobs:
            continue
        own = dict(pins.get(op, {}))
        winners = store.find(key_of(op, spec, target, own, space), space, facts)
        if winners is None and own:
            # A winner that agrees with the pins anyway serves as well as one tuned under them.
            winners = store.find(key_of(op, spec, target, {}, space), space, facts)
            if winners and any(winners.schedule[knob] != value for knob, value in own.items()):
                winners = None
        if winners is None:
            if set(own) != set(space.knobs):
                missing.append(op)
            continue
        if winners.stale:
            stale.append(op)
        schedule = winners.schedule
        if all(schedule[knob] == value for knob, value in own.items()):
            found.take(op, schedule, {name: best.schedule for name, best in winners.buckets.items()}, own)
        else:
            found.take(op, default, {}, own)
    parts = [f"no tuned schedule for {', '.join(missing)}: the default is used"] if missing else []
    if stale:
        parts.append(f"what was tuned for {', '.join(stale)} is stale: kernels or knobs have changed since")
    if parts:
        warnings.warn(
            f"{spec.name} on {target.name}: {'; '.join(parts)}. To tune: kvgen tune, or build(tune='quick').",
            UntunedWarning,
            stacklevel=4,
        )
    return found
