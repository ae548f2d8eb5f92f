"""The search over a judge whose times are made up: moves find the best near by, in the trials there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvgen.backends.cpu.backend import CpuBackend
from kvgen.ir import Schedule
from kvgen.passes.place import place
from kvgen.resolve import resolve_target
from kvgen.tune.bucket import Bucket
from kvgen.tune.candidate import Candidate
from kvgen.tune.journal import Journal
from kvgen.tune.search import Result, Search
from kvgen.tune.space import Space, load_space, spec_facts
from tests.support.faults import small

TARGET = resolve_target("cpu")
SPACE = load_space("cpp/decode")
FACTS = spec_facts(small(), TARGET)
DEFAULT = SPACE.default(TARGET, FACTS)


class Judge:
    """Takes the word of a function for times, and remembers what it was asked."""

    how = "measured"

    def __init__(self, cost: Callable[[Schedule], float], patience: int = 1000) -> None:
        self.cost, self.patience = cost, patience
        self.asked: list[Schedule] = []

    @property
    def late(self) -> bool:
        """Whether it has had enough."""
        return len(self.asked) >= self.patience

    def start(self, op: str, journal: Journal) -> None:
        """Begin."""

    def close(self) -> None:
        """End."""

    def rank(self, op: str, schedule: Schedule, workloads: Sequence[Bucket]) -> float:
        """A model that knows nothing."""
        return 0.0

    def prove(self, candidates: Sequence[Candidate]) -> None:
        """All are right."""
        self.asked += [c.schedule for c in candidates if c.alive]

    def time(self, pool: Sequence[Candidate], base: Candidate, workloads: Sequence[Bucket]) -> Candidate:
        """The function's word."""
        for candidate in pool:
            candidate.times = {b.name: self.cost(candidate.schedule) for b in workloads}
        return base

    def winner(
        self,
        pool: Sequence[Candidate],
        base: Candidate,
        workloads: Sequence[Bucket],
        order: Callable[[Schedule], tuple[int, ...]],
    ) -> Candidate:
        """The best."""
        alive = [c for c in pool if c.alive]
        return min(alive, key=lambda c: (self.cost(c.schedule), order(c.schedule)))

    def better(self, first: Candidate, second: Candidate, bucket: Bucket) -> bool:
        """Never."""
        return False


def bowl(schedule: Schedule) -> float:
    """Smallest far from the default, and falling all the way there."""
    goal = Schedule.of({**DEFAULT.to_dict(), "split_tokens": 4096, "tile": 256, "heads": 1})
    steps = sum(abs(v.index(schedule[k]) - v.index(goal[k])) for k, v in SPACE.knobs.items())
    return 1.0 + steps


def run(judge: Judge, folder: Path, trials: int, space: Space = SPACE) -> Result:
    search = Search(
        small(),
        place(small()),
        TARGET,
        CpuBackend(),
        effort="quick",
        progress=lambda step: None,
    )
    search._judge.close()
    search._judge = judge  # type: ignore[assignment]
    limited = Space(**{**vars(space), "effort": {"quick": trials}})
    journal = Journal(folder / "x.trials.jsonl", {})
    return search.run("decode", limited, FACTS, DEFAULT, {}, [], journal)


def test_moves_reach_the_bottom(tmp_path: Path) -> None:
    result = run(Judge(bowl), tmp_path, 60)
    assert bowl(result.winner) == 1.0


def test_moves_stop_where_no_neighbour_is_new(tmp_path: Path) -> None:
    judge = Judge(lambda schedule: 1.0 if schedule == DEFAULT else 2.0)
    result = run(judge, tmp_path, 90)
    assert result.winner == DEFAULT
    near = [s for s in SPACE.candidates(FACTS) if distance(s) == 1]
    assert set(near) <= {trial.schedule for trial in result.trials}


def distance(schedule: Schedule) -> int:
    return sum(abs(v.index(schedule[k]) - v.index(DEFAULT[k])) for k, v in SPACE.knobs.items())


@pytest.mark.parametrize("trials", [1, 2, 7, 10, 30])
def test_trials_are_spent_once_each(tmp_path: Path, trials: int) -> None:
    judge = Judge(bowl)
    result = run(judge, tmp_path, trials)
    schedules = [trial.schedule for trial in result.trials]
    assert len(set(schedules)) == len(schedules) == trials
    assert schedules[0] == DEFAULT
    assert len(set(judge.asked)) == len(judge.asked)
    moved = schedules[math.ceil(0.6 * trials) :]
    assert len(moved) == trials - math.ceil(0.6 * trials)


def test_no_move_is_made_when_time_is_up(tmp_path: Path) -> None:
    result = run(Judge(bowl, patience=1), tmp_path, 50)
    assert len(result.trials) == 30
