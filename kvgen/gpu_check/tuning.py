"""tuning: a race between the prepared schedules of an op, all of them known to be right, and its record."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.gpu_check.clock import Clock
from kvgen.gpu_check.folder import Candidate
from kvgen.gpu_check.library import CubinLibrary
from kvgen.gpu_check.scenes import Scenes, Workload
from kvgen.gpu_check.stopwatch import Run, Stopwatch, Timing
from kvgen.ir import Schedule
from kvgen.tune import store
from kvgen.tune.key import key_of
from kvgen.tune.outcome import geometric_mean
from kvgen.tune.space import Space, space_of

BUCKETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "decode": ((1, 8192), (8, 4096), (32, 2048)),
    "prefill": ((1, 512, 512), (1, 2048, 2048), (4, 32, 2048)),
    "append": ((8,), (256,)),
    "copy": ((64,),),
    "gather": ((4, 1024),),
    "merge": ((4, 256),),
}
"""Workloads by op."""

CLEARLY = 0.98
"""A rival's time over the default's must be below this to replace it."""

PROTOCOL = 1
"""Raised whenever workloads or the way samples are taken change."""


@dataclass(frozen=True)
class Tuned:
    """The race of one op."""

    op: str
    default: Schedule
    winner: Schedule
    times: Mapping[Schedule, Mapping[str, Timing]]
    """By schedule and bucket."""

    @property
    def speedup(self) -> float:
        """The default's time over the winner's, geometric mean over the buckets."""
        ratios = [
            self.times[self.default][name].seconds / timing.seconds
            for name, timing in self.times[self.winner].items()
        ]
        return geometric_mean(ratios) or 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "op": self.op,
            "default": self.default.to_dict(),
            "winner": self.winner.to_dict(),
            "speedup": self.speedup,
            "times": [
                {"schedule": s.to_dict(), **{name: dataclasses.asdict(t) for name, t in row.items()}}
                for s, row in self.times.items()
            ],
        }


def calls_of(library: CubinLibrary, candidate: Candidate, workload: Workload) -> Run:
    """A call of a candidate on the next turn of a workload, packed beforehand."""
    library.chosen = {candidate.plan.op: candidate.schedule}
    kernel = library.kernel(candidate.plan.op, candidate.plan.variant)
    library.chosen = {}
    turns = [kernel.bound(values) for values in workload.turns]

    def run(turn: int) -> None:
        for bound in turns[turn % len(turns)]:
            bound.run()

    return run


def tune(
    library: CubinLibrary, candidates: Sequence[Candidate], scenes: Scenes, watch: Stopwatch, clock: Clock
) -> Tuned | None:
    """Race the candidates of one op, the default first; None where the clock allows no workload."""
    op = candidates[0].plan.op
    times: dict[Schedule, dict[str, Timing]] = {c.schedule: {} for c in candidates}
    for sizes in BUCKETS[op]:
        name = "x".join(map(str, sizes))
        if not clock.fits(f"{library.spec.name}: tune {op} on {name}", 1.0):
            continue
        workload = scenes.make(op, sizes)
        runs = {str(i): calls_of(library, c, workload) for i, c in enumerate(candidates)}
        for i, timing in watch.race(runs, clock).items():
            times[candidates[int(i)].schedule][name] = timing
    default = candidates[0].schedule
    if not times[default]:
        return None
    return Tuned(op, default, _winner(default, times), times)


def _winner(default: Schedule, times: Mapping[Schedule, Mapping[str, Timing]]) -> Schedule:
    def ratio(schedule: Schedule) -> float:
        rows = times[schedule]
        return geometric_mean([rows[name].seconds / times[default][name].seconds for name in rows]) or 1.0

    best = min(times, key=ratio)
    return best if ratio(best) < CLEARLY else default


def record(library: CubinLibrary, tuned: Tuned, device: str, folder: Path) -> Path:
    """Write a race's winners as ``kvgen.tune.store`` keeps them: measured, on ``device``."""
    target, op = library.target, tuned.op
    space = space_of(op, target)
    key = key_of(op, library.spec, target, {}, space)
    templates, digest = library.prepared.digests[op]
    key = dataclasses.replace(key, templates=templates, space=digest)
    buckets = {name: _best(tuned, name, space) for name in tuned.times[tuned.default]}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    winners = store.Winners(tuned.winner, buckets, "measured", "quick", device, day)
    return store.write(winners, key, cache_dir=folder)


def _best(tuned: Tuned, bucket: str, space: Space) -> store.Best:
    """The winner of one bucket among the schedules that give the same bits as the general winner."""
    same = [s for s in tuned.times if all(s[knob] == tuned.winner[knob] for knob in space.numerics)]
    best = min(same, key=lambda s: tuned.times[s][bucket].seconds)
    if tuned.times[best][bucket].seconds > CLEARLY * tuned.times[tuned.winner][bucket].seconds:
        best = tuned.winner
    seconds = {s: tuned.times[s][bucket].seconds for s in (best, tuned.default)}
    return store.Best(best, seconds[best], seconds[tuned.default])
