"""choose: the schedules of a library, from the tuning cache or by tuning what is missing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from kvgen.backends.protocol import Backend
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.schedule import Knob
from kvgen.tune import store
from kvgen.tune.bucket import Bucket
from kvgen.tune.key import key_of
from kvgen.tune.space import load_space, spec_facts


class UntunedWarning(UserWarning):
    """Default or outdated schedules are in use; results are right, speed may not be."""


def choose(
    spec: Spec,
    record: PageRecord,
    target: Target,
    backend: Backend,
    mode: str,
    pins: Mapping[str, Mapping[str, Knob]],
    defaults: Mapping[str, Schedule],
    *,
    workloads: Mapping[str, Bucket] | None = None,
) -> dict[str, Schedule]:
    """Schedules by op for the ops that have something better than their default.

    ``mode``: ``cache`` never tunes: the stored winner (of the nearest bucket where ``workloads`` names one
    for the op), else the default, with one warning for all; ``quick`` and ``full`` tune what is missing
    first. The interpreter is never tuned: its times say nothing.
    """
    if target.interpreted:
        return {}
    if mode in ("quick", "full"):
        from kvgen.tune.tuner import tune_ops

        report = tune_ops(spec, record, target, backend, effort=mode, pins=pins, ops=tuple(defaults))
        return {done.op: done.winner for done in report.ops}
    facts = spec_facts(spec, target)
    found: dict[str, Schedule] = {}
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
        found[op] = winners.at((workloads or {}).get(op))
        if any(found[op][knob] != value for knob, value in own.items()):
            found[op] = default
    parts = [f"no tuned schedule for {', '.join(missing)}: the default is used"] if missing else []
    if stale:
        parts.append(f"the one for {', '.join(stale)} is stale: the templates have changed since")
    if parts:
        warnings.warn(
            f"{spec.name} on {target.name}: {'; '.join(parts)}. To tune: kvgen tune, or build(tune='quick').",
            UntunedWarning,
            stacklevel=4,
        )
    return found
