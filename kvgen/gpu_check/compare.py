"""compare: our kernels, with their winning schedules, against the machine's copy and against torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvgen.gpu_check import rivals
from kvgen.gpu_check.clock import Clock
from kvgen.gpu_check.library import CubinLibrary
from kvgen.gpu_check.scenes import Scenes, Workload
from kvgen.gpu_check.stopwatch import Run, Stopwatch
from kvgen.gpu_check.tuning import calls_of
from kvgen.ir import Schedule

CASES: dict[str, tuple[tuple[int, ...], ...]] = {
    "decode": ((32, 8192), (8, 4096), (32, 2048), (1, 8192), (1, 512)),
    "prefill": ((1, 2048, 2048), (4, 512, 512), (1, 512, 8704)),
    "append": ((32,), (8,)),
}
"""What is compared, the most telling first."""

NEEDS_S = {"decode": 4.0, "prefill": 4.0, "append": 1.0}
"""Seconds that a case is taken to need; flex compiles for longer, and is tried last."""

FLEX_S = 40.0

CLOSE_ENOUGH = 3e-2
"""Largest difference of outputs, relative to the largest: both sides round to the query's type."""


@dataclass(frozen=True)
class Row:
    """One contender of one case."""

    op: str
    case: str
    contender: str
    us: float
    spread: float
    gb_per_s: float
    """Bytes of the paged cache over the time; for the copy, bytes read and written."""
    of_copy: float
    """The same over the copy's."""
    ratio: float
    """Its time over ours."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def compare(
    library: CubinLibrary,
    winners: Mapping[str, Schedule],
    scenes: Scenes,
    watch: Stopwatch,
    clock: Clock,
    copy_bytes_per_s: float,
) -> list[Row]:
    """Rows of every case that fits; what did not is noted by the clock."""
    found: list[Row] = []
    for op, cases in CASES.items():
        own = library.prepared.of(op)
        if op not in winners:
            continue
        candidate = next(c for c in own if c.schedule == winners[op])
        for sizes in cases:
            what = f"{library.spec.name}: {op} {'x'.join(map(str, sizes))}"
            if not clock.fits(what, NEEDS_S[op]):
                continue
            work = scenes.make(op, sizes)
            runs = {"kvgen": calls_of(library, candidate, work)}
            runs |= _rivals(library, work, clock, what)
            times = watch.race(runs, clock)
            for name, timing in times.items():
                rate = work.nbytes / timing.seconds
                found.append(
                    Row(
                        op,
                        work.name,
                        name,
                        timing.seconds * 1e6,
                        timing.spread,
                        rate / 1e9,
                        rate / copy_bytes_per_s,
                        timing.seconds / times["kvgen"].seconds,
                    )
                )
    return found


def _rivals(library: CubinLibrary, work: Workload, clock: Clock, what: str) -> dict[str, Run]:
    """The rivals that run here and whose outputs agree with ours."""
    makers = rivals.append(library, work) if work.op == "append" else rivals.attention(library, work)
    ours = None if work.op == "append" or not makers else rivals.output(library, work)
    found: dict[str, Run] = {}
    for name, make in makers.items():
        if "flex" in name and not clock.fits(f"{what}: {name}", FLEX_S):
            continue
        if (run := _made(make, clock, f"{what}: {name}")) is None:
            continue
        # Not "> CLOSE_ENOUGH": a NaN must be far.
        if ours is not None and not (far := _difference(library, work, ours, run(0))) <= CLOSE_ENOUGH:
            clock.skip(f"{what}: {name}", f"its output differs from ours by {far:.3g} of the largest")
            continue
        found[name] = run
    return found


def _made(make: Callable[[], Run], clock: Clock, what: str) -> Run | None:
    try:
        run = make()
        run(0)
    except Exception as error:  # noqa: BLE001 - another library, a compiler among them: no reason to end the check
        clock.skip(what, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")
        return None
    return run


def _difference(library: CubinLibrary, work: Workload, ours: Any, theirs: Any) -> float:
    """Largest difference over the largest value of ours."""
    att = library.spec.attention
    if theirs.shape[1] == att.kv_heads and work.op == "decode" and theirs.shape[2] == att.group:
        theirs = theirs.reshape(-1, att.q_heads, att.v_head_dim)
    else:
        theirs = theirs.transpose(1, 2).reshape(-1, att.q_heads, att.v_head_dim)
    return float((ours.float() - theirs.float()).abs().max() / ours.float().abs().max())
