"""telling: what the tuner does now, in words, and as lines on stderr for a caller of ``kvgen.build``."""

from __future__ import annotations

import sys

from kvgen.tune.outcome import Progress, Step

STAGES = {
    "prove": "compile and check",
    "race": "race",
    "final": "compare the finalists with the default",
    "done": "done",
}
"""Words for the stages of an op."""


def lines(spec: str, target: str) -> Progress:
    """Tells each stage of each op once, on stderr, with the name of what is tuned."""
    told: set[tuple[str, str]] = set()

    def tell(step: Step) -> None:
        if (step.op, step.stage) in told:
            return
        told.add((step.op, step.stage))
        count = f" ({step.total})" if step.total > 1 and step.stage != "done" else ""
        print(
            f"tuning {spec} on {target}: {step.op}: {STAGES[step.stage]}{count}{_times(step)}",
            file=sys.stderr,
            flush=True,
        )

    return tell


def _times(step: Step) -> str:
    if step.stage != "done" or step.best_s is None:
        return ""
    default = f", default {step.default_s * 1e6:,.3g} us" if step.default_s else ""
    return f": {step.best_s * 1e6:,.3g} us{default}"
