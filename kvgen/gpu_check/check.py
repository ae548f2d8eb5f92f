"""check: all of it, on a machine with a GPU: conformance, tuning, comparison, records; within a budget.

A spec whose default kernels are not all right is neither tuned nor timed: its figures would say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgen import paths
from kvgen.backends.triton.driver import Device, Driver
from kvgen.errors import ToolchainError, UnsupportedError
from kvgen.gpu_check import folder as folders
from kvgen.gpu_check import rivals, tuning
from kvgen.gpu_check.clock import Clock
from kvgen.gpu_check.compare import compare
from kvgen.gpu_check.conform import Conformance
from kvgen.gpu_check.library import CubinLibrary
from kvgen.gpu_check.scenes import Scenes
from kvgen.gpu_check.stopwatch import Stopwatch

BUDGET_S = 420.0
"""Seconds of a run: a minute below the eight that it may take, for what starts and ends it."""

RESULT = "result.json"

TUNE_ORDER = ("decode", "prefill", "append", "gather", "copy", "merge")
"""The ops that matter most come first."""

Say = Callable[[str], None]


def check(
    folder: Path,
    *,
    driver: Driver | None = None,
    device: str = "cuda",
    budget_s: float = BUDGET_S,
    copy_bytes: int = rivals.COPY_BYTES,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Run a prepared folder; returns what also stands in ``DIR/result.json`` then.

    ``driver`` and ``device`` are the machine's own unless a rehearsal says otherwise. Raises
    ``ToolchainError`` for a damaged folder or no driver, ``UnsupportedError`` for another GPU.
    """
    manifest = folders.read(folder)
    if driver is None:
        _initialise(device)
        driver = Driver()
    found = driver.device()
    if found.target != manifest.target:
        raise UnsupportedError(
            f"{folder}: made for {manifest.target}, and the GPU here is {found.name} ({found.target}); "
            f"prepare with --target {found.target}"
        )
    clock = Clock(budget_s)
    watch = Stopwatch(driver, _occupy(device))
    say(f"{found.name}, {found.target}: copy bandwidth")
    run, moved = rivals.copy(device, copy_bytes)
    limit = moved / watch.race({"copy": run}, clock.share(2.0))["copy"].seconds
    specs = []
    for at, prepared in enumerate(manifest.prepared):
        share = clock.share(clock.left / (len(manifest.prepared) - at))
        library = CubinLibrary(folder, prepared, driver, manifest.target, device)
        specs.append(_one(library, found, folder, watch, share, limit, say))
    result = {
        "device": vars(found),
        "kvgen": manifest.kvgen,
        "toolchain": manifest.toolchain,
        "protocol": tuning.PROTOCOL,
        "copy_gb_per_s": limit / 1e9,
        "seconds": round(clock.spent, 1),
        "specs": specs,
        "skipped": [vars(skip) for skip in clock.skips],
    }
    paths.write_atomic(folder / RESULT, json.dumps(result, indent=1) + "\n")
    return result


def _one(
    library: CubinLibrary,
    device: Device,
    folder: Path,
    watch: Stopwatch,
    clock: Clock,
    limit: float,
    say: Say,
) -> dict[str, Any]:
    """One spec. A third of its time may go into checks, a third into tuning."""
    name = library.spec.name
    ops = [op for op in TUNE_ORDER if library.prepared.of(op)]
    conformance = Conformance(library, clock.share(clock.left / 2))
    say(f"{name}: conformance of the defaults")
    right = conformance.defaults(ops)
    report: dict[str, Any] = {"spec": name, "spec_hash": library.spec.hash, "conforms": right}
    if not right:
        clock.skip(f"{name}: tuning and timing", "conformance failed")
        return report | {
            "checks": [c.to_dict() for c in conformance.checks],
            "tuned": [],
            "rows": [],
            "records": [],
        }
    scenes = Scenes(library, device.l2_bytes)
    tuned = []
    for op in ops:
        say(f"{name}: {op}: check and race {len(library.prepared.of(op))} schedules")
        alive = [c for c in library.prepared.of(op) if conformance.candidate(c)]
        if alive and alive[0].default and (won := tuning.tune(library, alive, scenes, watch, clock)):
            tuned.append(won)
    records = [tuning.record(library, won, device.name, folder / "autotune_cache") for won in tuned]
    say(f"{name}: against copy, SDPA and flex")
    rows = compare(library, {won.op: won.winner for won in tuned}, scenes, watch, clock, limit)
    return report | {
        "checks": [c.to_dict() for c in conformance.checks],
        "tuned": [won.to_dict() for won in tuned],
        "rows": [row.to_dict() for row in rows],
        "records": [path.relative_to(folder).as_posix() for path in records],
    }


def _initialise(device: str) -> None:
    """Let torch make the context that the driver then shares."""
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError(f"torch {torch.__version__} can use no GPU here; the check needs one")
    torch.zeros(1, device=device)


def _occupy(device: str) -> Callable[[int], None]:
    """Keep the device busy for so many cycles; in a rehearsal there is none."""
    import torch

    if device == "cpu":
        return lambda cycles: None
    return torch.cuda._sleep
