"""tune: for each op find what is stored, or search, and store the winner.

A hit is answered without the compiler's front end, torch or a worker: those are imported by the first miss.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.backends.protocol import Backend
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import OPS
from kvgen.ir.schedule import Knob
from kvgen.ir.verify import verify_record
from kvgen.passes.place import place
from kvgen.passes.preset import resolve as resolve_preset
from kvgen.passes.validate import load_spec
from kvgen.resolve import backend_for, resolve_target
from kvgen.tune import store
from kvgen.tune.defaults import default_in
from kvgen.tune.device import device_name
from kvgen.tune.journal import Journal
from kvgen.tune.key import Key, key_of
from kvgen.tune.outcome import BucketReport, OpReport, Progress, Step, TuneReport, geometric_mean
from kvgen.tune.pins import check_pins
from kvgen.tune.space import space_of, spec_facts

if TYPE_CHECKING:
    from kvgen.tune.search import Search

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
    spec = resolve_preset(spec, resolved)
    record = place(spec)
    verify_record(spec, record)
    return tune_ops(
        spec, record, resolved, backend, effort=effort, pins=pins or {}, ops=ops, progress=progress,
        cache_dir=cache_dir,
    )  # fmt: skip


def tune_ops(
    spec: Spec,
    record: PageRecord,
    target: Target,
    backend: Backend | None,
    *,
    effort: str,
    pins: Pins,
    ops: Sequence[str] = OPS,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> TuneReport:
    """``tune`` for what is resolved already."""
    started = time.monotonic()
    check_request(target, effort, (*ops, *pins))
    say = progress or (lambda step: None)
    reports: list[OpReport] = []
    search: Search | None = None

    def begin() -> Search:
        nonlocal search
        if search is None:
            from kvgen.tune.search import Search

            judged = backend or backend_for(target)
            search = Search(spec, record, target, judged, effort=effort, progress=say)
        return search

    _check_pins(spec, record, target, backend, pins)
    try:
        for op in OPS:
            if op in ops:
                report = _tune_op(spec, target, op, effort, dict(pins.get(op, {})), cache_dir, begin)
                say(Step(op, "done", len(reports) + 1, len(ops), report.winner_s, report.default_s))
                reports.append(report)
    finally:
        if search is not None:
            search.close()
    seconds = time.monotonic() - started
    return TuneReport(spec.name, spec.hash, target.name, effort, seconds, tuple(reports))


def _check_pins(spec: Spec, record: PageRecord, target: Target, backend: Backend | None, pins: Pins) -> None:
    """Refuse pins that no kernel uses as given, before anything is tuned."""
    for op, knobs in pins.items():
        if knobs:
            default = default_in(space_of(op, target), op, spec, target, knobs)
            check_pins(backend or backend_for(target), op, spec, record, target, default, knobs)


def check_request(target: Target, effort: str, ops: Sequence[str]) -> None:
    """Refuse what cannot be tuned; see ``tune``."""
    if effort not in EFFORTS:
        raise ArgumentError(f"effort = {effort!r}: give one of {', '.join(EFFORTS)}")
    for op in ops:
        if op not in OPS:
            raise ArgumentError(f"{op!r} is no op; the ops are {', '.join(OPS)}")
    if target.interpreted:
        raise UnsupportedError("target 'interpret' is not tuned: an interpreter's times say nothing")


def _tune_op(
    spec: Spec,
    target: Target,
    op: str,
    effort: str,
    pins: dict[str, Knob],
    cache_dir: Path | None,
    begin: Callable[[], Search],
) -> OpReport:
    started = time.monotonic()
    space, facts, device = space_of(op, target), spec_facts(spec, target), device_name(target)
    key = key_of(op, spec, target, pins, space)
    default = default_in(space, op, spec, target, pins)
    timed = target.backend == "cpu"
    # A prediction holds anywhere, and what was measured on such a GPU is worth more.
    held = store.find(key, space, facts, cache_dir=cache_dir, own=timed)
    if held and timed and (held.device != device or held.elsewhere):
        store.evict(
            key,
            f"was measured on {held.device!r}, and this is {device!r}: it is a starting point only",
            cache_dir=cache_dir,
        )
    elif held and not held.stale and effort_suffices(held.effort, effort):
        return _from_store(op, default, held, time.monotonic() - started)
    seed = held or store.find(key, space, facts, cache_dir=cache_dir)
    search = begin()
    journal = journal_of(key, device, cache_dir)
    seeds = [seed.schedule] if seed else []
    result = search.run(op, space, facts, default, pins, seeds, journal)
    winners = store.Winners(
        result.winner,
        {name: store.Best(b.schedule, b.winner_s, b.default_s) for name, b in result.buckets.items()},
        search.how,
        effort,
        device,
        datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    store.write(winners, key, cache_dir=cache_dir)
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
        resumed=journal.used,
        notes=tuple(journal.notes),
    )


def journal_of(key: Key, device: str, cache_dir: Path | None) -> Journal:
    """The log of a key's trials on a device, beside its winners."""
    path = store.home(key, cache_dir) / f"{key.stem}.trials.jsonl"
    return Journal(path, key.identity() | {"device": device})


def effort_suffices(stored: str, wanted: str) -> bool:
    """Whether winners of one effort answer a request for another."""
    return stored in EFFORTS and EFFORTS.index(stored) >= EFFORTS.index(wanted)


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
