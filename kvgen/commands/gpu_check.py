"""kvgen bench --gpu-check DIR: prepare a check of a GPU where there is none; run it where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from kvgen.commands import output
from kvgen.commands.options import read_spec
from kvgen.commands.progress import progress
from kvgen.errors import ArgumentError


def run(
    folder: str,
    specs: Sequence[str],
    *,
    prepare: bool = False,
    target: str = "sm_90",
    seconds: float | None = None,
    as_json: bool = False,
) -> None:
    """With ``prepare``, compile what a check of ``specs`` needs into ``folder``; without, run the check."""
    if prepare:
        _prepare(Path(folder), specs, target, as_json)
        return
    if specs:
        raise ArgumentError(f"SPEC {specs[0]}: a check runs what {folder} holds; to change that, --prepare")
    _check(Path(folder), seconds, as_json)


def _prepare(folder: Path, specs: Sequence[str], target: str, as_json: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"--gpu-check {folder}: is a file; give a folder, which --prepare may make")
    loaded = [read_spec(spec) for spec in specs]
    from kvgen.gpu_check.prepare import prepare

    with progress(quiet=as_json) as advance:
        made = prepare(folder, loaded, target, say=lambda text: advance(text, 0, 1, ""))
    rows = [
        (p.spec.name, op, len(p.of(op)), sum(len(b.binaries) for b in p.candidates if b.plan.op == op))
        for p in made.prepared
        for op in p.digests
    ]
    if as_json:
        names = ("spec", "op", "schedules", "cubins")
        output.print_json({"target": made.target, "ops": [dict(zip(names, r, strict=True)) for r in rows]})
        return
    output.table(("spec", "op", "schedules", "cubins"), rows, title=f"Prepared for {made.target} in {folder}")
    output.line(f"On the machine with the GPU: kvgen bench --gpu-check {folder}")


def _check(folder: Path, seconds: float | None, as_json: bool) -> None:
    from kvgen.gpu_check.check import BUDGET_S, check

    with progress(quiet=as_json) as advance:
        found = check(folder, budget_s=seconds or BUDGET_S, say=lambda text: advance(text, 0, 1, ""))
    if as_json:
        output.print_json(found)
    else:
        print_result(found)
    if not all(spec["conforms"] for spec in found["specs"]):
        raise typer.Exit(1)


def print_result(found: dict[str, Any]) -> None:
    """Tables of a check's result."""
    device = found["device"]
    copy = f"copy {found['copy_gb_per_s']:,.0f} GB/s"
    output.line(f"{device['name']} ({device['target']}), {copy}, {found['seconds']} s")
    for spec in found["specs"]:
        wrong = [check for check in spec["checks"] if not check["ok"]]
        verdict = "all right" if not wrong else f"conformance failed in {len(wrong)}"
        output.heading(f"{spec['spec']}: {len(spec['checks'])} kernels against the oracle, {verdict}")
        for check in wrong:
            output.line(f"  {check['op']} {check['variant']}: {check['message']}")
        if spec["tuned"]:
            rows: list[tuple[Any, ...]] = [
                (t["op"], f"{t['speedup']:.2f}", len(t["times"]), _knobs(t["winner"])) for t in spec["tuned"]
            ]
            output.table(("op", "times faster", "raced", "winner"), rows, right=("times faster", "raced"))
        if spec["rows"]:
            columns = ("op", "case", "contender", "us", "GB/s", "of copy", "times kvgen's")
            rows = [
                (r["op"], r["case"], r["contender"], f"{r['us']:,.1f}", f"{r['gb_per_s']:,.0f}",
                 f"{r['of_copy']:.2f}", f"{r['ratio']:.2f}")
                for r in spec["rows"]
            ]  # fmt: skip
            output.table(columns, rows, right=columns[3:])
    records = [name for spec in found["specs"] for name in spec["records"]]
    if records:
        output.line(
            f"{len(records)} records, to be copied into the source's autotune_cache/: {', '.join(records)}"
        )
    for skip in found["skipped"]:
        output.line(f"left out: {skip['what']}: {skip['reason']}")


def _knobs(schedule: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(schedule.items()))
