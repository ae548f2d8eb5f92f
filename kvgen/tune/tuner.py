"""tune: for each op enumerate, rank, compile, check, race, compare with the default, store.

A small tuner with the seams of the full one: ``model.select`` proposes candidates (pattern moves would
propose more), ``remote.Remote`` runs them, ``race`` eliminates, ``store`` keeps; every candidate's end is a
``Trial``, appended as JSON lines beside the winners.
"""

from __future__ import annotations

import datetime
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvgen import paths
from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import OPS
from kvgen.ir.schedule import Knob
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.passes.verify import verify_record
from kvgen.resolve import backend_for, resolve_target
from kvgen.tune import store
from kvgen.tune.defaults import default_schedule
from kvgen.tune.outcome import BucketReport, OpReport, Progress, Step, TuneReport, geometric_mean
from kvgen.tune.search import Result, Search
from kvgen.tune.space import load_space, spec_facts

EFFORTS = ("quick", "full")

Pins = Mapping[str, Mapping[str, Knob]]
"""Pinned knobs by op."""


def tune(
    spec: Spec | str | Path | Mapping[str, Any],
    target: str = "cpu",
    *,
    effort: str = "quick",
    ops: Sequence[str] = OPS,
    pins: Pins | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    backend: Backend | None = None,
) -> TuneReport:
    """Find and store good schedules for the ops of ``spec`` on ``target``; what is stored is not redone.

    ``effort``: ``quick`` (a minute or two on a CPU) or ``full``. ``pins`` fixes knobs, as in ``build``.
    ``cache_dir`` takes the place of ``tune/`` in the user cache. CPU candidates are timed here; GPU ones are
    judged by their binaries and marked ``predicted``. Raises ``ArgumentError``, ``SpecError``,
    ``UnsupportedError`` (the interpreter) and ``ToolchainError`` (no compiler, or no right kernel at all).
    """
    spec = spec if isinstance(spec, Spec) else load_spec(spec)
    resolved = resolve_target(target)
    record = place(spec)
    verify_record(spec, record)
    return tune_ops(
        spec,
        record,
        resolved,
        backend or backend_for(resolved),
        effort=effort,
        pins=pins or {},
        ops=ops,
        progress=progress,
        cache_dir=cache_dir,
    )


def tune_ops(
    spec: Spec,
    record: PageRecord,
    target: Target,
    backend: Backend,
    *,
    effort: str,
    pins: Pins,
    ops: Sequence[str] = OPS,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> TuneReport:
    """``tune`` for what is resolved already."""
    started = time.monotonic()
    if effort not in EFFORTS:
        raise ArgumentError(f"effort = {effort!r}: give one of {', '.join(EFFORTS)}")
    for op in (*ops, *pins):
        if op not in OPS:
            raise ArgumentError(f"{op!r} is no op; the ops are {', '.join(OPS)}")
    if target.interpreted:
        raise UnsupportedError("target 'interpret' is not tuned: an interpreter's times say nothing")
    say = progress or (lambda step: None)
    reports: list[OpReport] = []
    with Search(spec, record, target, backend, effort=effort, progress=say) as search:
        for op in OPS:
            if op in ops:
                report = _tune_op(search, op, dict(pins.get(op, {})), cache_dir)
                say(Step(op, "done", len(reports) + 1, len(ops), report.winner_s, report.default_s))
                reports.append(report)
    seconds = time.monotonic() - started
    return TuneReport(spec.name, spec.hash, target.name, effort, seconds, tuple(reports))


def _tune_op(search: Search, op: str, pins: dict[str, Knob], cache_dir: Path | None) -> OpReport:
    started = time.monotonic()
    spec, target, backend = search.spec, search.target, search.backend
    space = load_space(backend.space(op))
    facts = spec_facts(spec, target)
    key = store.key_of(op, spec, target, pins, space)
    default = default_schedule(backend, op, spec, target, pins)
    held = store.find(key, space, facts, cache_dir=cache_dir, own=True)
    if held and not held.stale and _enough(held, search):
        return _from_store(op, default, held, time.monotonic() - started)
    seed = held or store.find(key, space, facts, cache_dir=cache_dir)
    result = search.run(op, space, facts, default, pins, [seed.schedule] if seed else [])
    winners = store.Winners(
        result.winner,
        {name: store.Best(b.schedule, b.winner_s, b.default_s) for name, b in result.buckets.items()},
        search.how,
        search.effort,
        search.device,
        datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    path = store.write(winners, key, cache_dir=cache_dir)
    _log(path.with_suffix(".trials.jsonl"), result, winners)
    return OpReport(
        op=op,
        how=search.how,
        cached=False,
        default=default,
        winner=result.winner,
        default_s=_mean([b.default_s for b in result.general]),
        winner_s=_mean([b.winner_s for b in result.general]),
        outcomes=dict(sorted(Counter(trial.outcome.value for trial in result.trials).items())),
        seconds=time.monotonic() - started,
        buckets=tuple(result.buckets.values()),
        trials=tuple(result.trials),
    )


def _enough(held: store.Winners, search: Search) -> bool:
    """Whether stored winners answer this request: at least this effort, and timed on this machine."""
    known = EFFORTS.index(held.effort) if held.effort in EFFORTS else -1
    return known >= EFFORTS.index(search.effort) and held.device == search.device


def _from_store(op: str, default: Schedule, held: store.Winners, seconds: float) -> OpReport:
    rows = tuple(
        BucketReport(name, best.schedule, best.default_seconds, best.seconds)
        for name, best in held.buckets.items()
    )
    general = [b for b in rows if b.schedule == held.schedule] or list(rows)
    return OpReport(
        op=op,
        how=held.how,
        cached=True,
        default=default,
        winner=held.schedule,
        default_s=_mean([b.default_s for b in general]),
        winner_s=_mean([b.winner_s for b in general]),
        outcomes={},
        seconds=seconds,
        buckets=rows,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return geometric_mean(known) if len(known) == len(values) else None


def _log(path: Path, result: Result, winners: store.Winners) -> None:
    """Append every trial, so that what failed can be studied. The folder was written to a moment ago."""
    head = {"date": winners.date, "device": winners.device, "kvgen": winners.version}
    lines = [json.dumps(head | trial.to_dict(), sort_keys=True) + "\n" for trial in result.trials]
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write("".join(lines))
    except OSError as error:
        if error.errno not in paths.UNWRITABLE:
            raise
        store.warn(path, f"trials were not logged ({error.strerror})")
