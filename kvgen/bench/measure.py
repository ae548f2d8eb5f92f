"""measure: one case from contenders to rows: made, checked, timed in turns, told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvgen.bench import entries as contenders
from kvgen.bench.cases import Case
from kvgen.bench.contender import Scene, Shape
from kvgen.bench.entries import Say
from kvgen.bench.limits import Limits
from kvgen.bench.peers.registry import Peer
from kvgen.bench.report import OK, CaseReport
from kvgen.bench.rows import rows_of
from kvgen.bench.turns import REST_S, Clock, Waited, take_turns
from kvgen.bench.waits import steal_ticks, waited_ns
from kvgen.library import Library


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    threads: int = 1
    rounds: int = 15
    seconds: float = 8.0
    """Budget of one case's samples."""
    cold_bytes: int | None = None
    """Bytes between two uses of the same memory; None: four last-level caches."""
    seed: int = 0
    clock: Clock = time.perf_counter
    waited: Waited = waited_ns


def measure(
    case: Case, libraries: Mapping[str, Library], peers: Sequence[Peer], settings: Settings, say: Say
) -> CaseReport:
    """One case of libraries, by name, that share an attention."""

    def scene_of(each: Case, shape: Shape) -> Scene:
        return Scene(each, shape, settings.threads, cold_bytes=settings.cold_bytes, seed=settings.seed)

    before = steal_ticks()
    found, left_out = contenders.gather(case, libraries, peers, scene_of, say)
    contenders.check(found, case, say)
    live = [entry for entry in found if entry.status == OK]
    for entry in live:
        entry.warm_up(settings.clock, settings.threads)
    limits = Limits.of(live, settings.threads)
    lanes = [entry.lane for entry in live if entry.lane is not None]
    rounds = take_turns(
        [*lanes, *limits.all()],
        rounds=settings.rounds,
        seconds=settings.seconds,
        seed=settings.seed,
        clock=settings.clock,
        waited=settings.waited,
        rest=(lambda: time.sleep(REST_S)) if settings.threads > 1 else (lambda: None),
        advance=lambda done, total: say(f"{case.name}: timing", done, total, "rounds"),
    )
    mode = limits.mode()
    return CaseReport(
        case=case.name,
        title=str(case),
        shape=str(Shape.of(next(iter(libraries.values())).spec)),
        rounds=rounds,
        limits=limits.told(mode.others),
        peaks=limits.peaks_told(mode.others),
        mode=mode.name,
        scaling=mode.scaling,
        other_mode_rounds=len(mode.others),
        rows=rows_of(found, limits, mode.others),
        left_out=left_out,
        stolen=_stolen(before, steal_ticks()),
    )


def _stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Share of the machine's time that its hypervisor took."""
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
