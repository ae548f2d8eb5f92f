"""limits: what no contender of a case can beat, as lanes among theirs: reading its pool, and arithmetic."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgen.backends.cpu.read_limit import read_limit
from kvgen.bench import mode
from kvgen.bench.entries import Entry
from kvgen.bench.ours import Ours
from kvgen.bench.peak import peak
from kvgen.bench.report import Limit
from kvgen.bench.stats import Figure, figure
from kvgen.bench.turns import Lane

PIECE = 32 << 20
"""Bytes of a pool that one sample reads: a millisecond's worth. A piece that comes back has long left the
cache, as the others pass before it."""


@dataclass
class Limits:
    """A read limit for the pool of each spec; of several threads also that of one, for the largest pool."""

    threads: int
    pools: dict[str, Any] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    single: Lane | None = None
    peaks: dict[str, Lane] = field(default_factory=dict)
    """Of a prefill: the limit of arithmetic, by its kind."""

    @classmethod
    def of(cls, entries: Sequence[Entry], threads: int) -> Limits:
        """The limits of the pools of kvgen's contenders."""
        made = cls(threads)
        for entry in entries:
            if isinstance(entry.contender, Ours) and entry.spec is not None:
                made.pools.setdefault(entry.spec, entry.contender.pool)
        made.lanes = {name: _lane(name, pool, threads) for name, pool in made.pools.items()}
        if threads > 1 and made.pools:
            made.single = _lane("one thread", made.pools[made.largest], 1)
        kinds = [entry.arithmetic for entry in entries if entry.case.op == "prefill"]
        made.peaks = {kind: _peak_lane(kind, threads) for kind in dict.fromkeys(kinds) if kind}
        return made

    @property
    def largest(self) -> str:
        """The spec with the largest pool."""
        return max(self.pools, key=lambda name: int(self.pools[name].numel()))

    def all(self) -> list[Lane]:
        """Every lane."""
        return [*self.lanes.values(), *([self.single] if self.single else []), *self.peaks.values()]

    def mode(self) -> mode.Mode:
        """How the memory served the threads in each round."""
        if self.single is None:
            return mode.Mode(None, None, frozenset())
        return mode.judge(self.lanes[self.largest].samples, self.single.samples, self.threads)

    def lane_of(self, spec: str | None) -> Lane | None:
        """The lane of a spec's pool; of the first one for a peer."""
        return self.lanes.get(spec) if spec is not None else next(iter(self.lanes.values()), None)

    def told(self, others: frozenset[int]) -> tuple[Limit, ...]:
        """The figures, without the rounds in the other mode."""
        return tuple(
            Limit(
                name,
                self.threads,
                int(self.pools[name].numel()),
                figure(kept(lane, others).values()),
                lane.dropped,
            )
            for name, lane in self.lanes.items()
        )

    def peaks_told(self, others: frozenset[int]) -> dict[str, Figure]:
        """The limits of arithmetic, without the rounds in the other mode."""
        found = {kind: figure(kept(lane, others).values()) for kind, lane in self.peaks.items()}
        return {kind: value for kind, value in found.items() if value is not None}


def kept(lane: Lane | None, others: frozenset[int]) -> dict[int, float]:
    """Samples of the rounds that count."""
    return {} if lane is None else {turn: value for turn, value in lane.samples.items() if turn not in others}


def _lane(name: str, pool: Any, threads: int) -> Lane:
    """Samples of one piece of a pool after the other: as short as those of contenders, and as cold."""
    count = max(1, len(pool) // PIECE)
    pieces = itertools.cycle([pool[i * PIECE : (i + 1) * PIECE] for i in range(count)])

    def sample() -> float:
        return read_limit(next(pieces), threads, 1).bytes_per_s

    return Lane(f"read limit, {name}", sample, cost_s=min(PIECE, len(pool)) / sample())


def _peak_lane(kind: str, threads: int) -> Lane:
    start = time.perf_counter()
    peak(kind, threads)
    return Lane(f"arithmetic, {kind}", lambda: peak(kind, threads), cost_s=time.perf_counter() - start)
