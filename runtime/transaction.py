"""Transaction: a call of an engine commits whole or not at all, at whatever instruction it is interrupted.

All host state that a call may change is saved when it begins, in values that are never written. An exception
restores it at once; should that be interrupted too, the next call begins with it. The commit is one
assignment, the last that a call does. Bytes on the device need no undoing: until a commit, a step writes only
behind the tokens that count and to pages that nobody held, with one exception, the pages of requests that it
preempted. Such a request therefore stays preempted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvgen.runtime.pool import PoolState
from kvgen.runtime.request import Request

if TYPE_CHECKING:
    from kvgen.runtime.engine import Engine


@dataclass(frozen=True)
class Saved:
    """The host state of an engine at the begin of a call."""

    pool: PoolState
    raw_rows: Any
    requests: Mapping[int, Request]
    next_id: int
    untold: tuple[int, ...]
    waiting: tuple[Request, ...]
    running: tuple[Request, ...]
    states: tuple[tuple[Request, Any], ...]
    """What each request that the call may change was."""
    victims: list[Request] = field(default_factory=list)
    """Requests that the call has preempted, noted before their pages are freed."""


def save(engine: Engine, also: tuple[Request, ...] = ()) -> Saved:
    """The state of ``engine``: requests that run, those that may be let in (the first ``max_batch``), and
    ``also``."""
    scheduler = engine.scheduler
    touched = (*scheduler.running, *scheduler.waiting[: scheduler.max_batch], *also)
    return Saved(
        engine.store.pool.state(),
        engine.store.rows.state(),
        dict(engine.requests),
        engine.next_id,
        engine.untold,
        tuple(scheduler.waiting),
        tuple(scheduler.running),
        tuple((request, request.state()) for request in touched),
    )


def restore(engine: Engine, saved: Saved) -> None:
    """Make ``engine`` what it was, but for preempted requests, which wait. May be interrupted and
    repeated."""
    scheduler = engine.scheduler
    engine.store.pool.restore(saved.pool)
    engine.store.rows.restore(saved.raw_rows)
    for request, state in saved.states:
        request.restore(state)
    engine.requests, engine.next_id = dict(saved.requests), saved.next_id
    scheduler.waiting, scheduler.running = list(saved.waiting), list(saved.running)
    victims = [request for request in saved.victims if request in saved.running]
    for victim in victims:
        scheduler.preempt(victim)
    engine.untold = (*saved.untold, *(victim.id for victim in victims))


class Transaction:
    """A ``with`` block around all that a call of an engine does, its ``return`` included."""

    def __init__(self, engine: Engine, *also: Request) -> None:
        """``also``: requests that the call may change, wherever they wait."""
        self.engine, self.also = engine, also

    def __enter__(self) -> Saved:
        self.engine.undo()
        saved = self.engine.saved = save(self.engine, self.also)
        return saved

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.engine.undo()
        else:
            self.engine.saved = None  # the commit: nothing of the call comes after it
