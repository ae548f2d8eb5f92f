"""A tuning run for a test to kill: ``python -m tests.tune.interrupted FOLDER`` prints its report as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvgen.backends.cpu.backend import CpuBackend
from kvgen.tune import bucket, judge_cpu, moves
from kvgen.tune.tuner import tune
from tests.support.faults import small


def main() -> None:
    """Tune decode of a small spec: ten candidates, and rounds long enough to be killed between them."""
    judge_cpu.BUDGET_S["quick"] = 0.06
    judge_cpu.DUEL_S["quick"] = 0.05
    judge_cpu.OP_S["quick"] = {}
    bucket.BUCKETS["quick"] = {**bucket.BUCKETS["quick"], "decode": ((1, 40), (2, 80))}
    # Where a run moves to depends on times: without moves two runs try the same.
    moves.neighbours = lambda *given: iter(())  # type: ignore[assignment, misc]
    report = tune(small(), ops=["decode"], cache_dir=Path(sys.argv[1]), backend=CpuBackend("-O1"))
    print(json.dumps(report.to_dict()))


if __name__ == "__main__":
    main()
