"""The parent: starts workers, and tells what they found or of what they died."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.judge import Finding

HANG_S = 60.0
"""A call that takes longer hangs; its worker is killed."""
STARTING = ("starting", "compiling")
PIECE_S = 60.0
"""A worker's life: what it found is told then, and memory that calls leaked is gone."""


def fuzz(
    seconds: float, seed: int, specs: int, first: int = 0, last: int | None = None
) -> tuple[int, list[Finding]]:
    """Make random calls for so many seconds (compiling not counted): how many, and what must not happen."""
    number, left, deaths = first, seconds, []
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), Path(name, "found")
        found.touch()
        while left > 0.2 and (last is None or number <= last):
            number, death, spent = _piece(folder, seed, number, min(left, PIECE_S), specs, last)
            deaths += [death] if death else []
            left -= spent
            lines = found.read_text().splitlines()
            print(f"{number} calls, {len(lines)} findings, {len(deaths)} deaths", file=sys.stderr)
        return number - first, deaths + [Finding(*json.loads(line)) for line in lines]


def _piece(
    folder: Path, seed: int, first: int, seconds: float, specs: int, last: int | None
) -> tuple[int, Finding | None, float]:
    """One worker: the next number, of what it died (if it did), seconds spent on calls."""
    code = (
        "import sys, pathlib; from tests.fuzz.worker import main; "
        f"main(pathlib.Path({str(folder)!r}), {seed}, {first}, {seconds}, {specs}, {last})"
    )
    return watch([sys.executable, "-c", code], folder / "note", first, seconds)


def watch(command: list[str], note: Path, first: int, seconds: float) -> tuple[int, Finding | None, float]:
    """Run a worker to its end, or to its last call. ``note`` is where it says what it does."""
    note.write_text(f"{first}\tstarting")
    seen, since, began = "", time.monotonic(), 0.0
    worker = subprocess.Popen(command)
    while worker.poll() is None:
        time.sleep(0.1)
        if (now := note.read_text(errors="replace").strip()) != seen:
            seen, since = now, time.monotonic()
            if not now.endswith(STARTING):
                began = began or since
        if began and time.monotonic() - since > HANG_S:
            worker.kill()
    spent = time.monotonic() - began if began else seconds
    text, _, call = note.read_text(errors="replace").strip().partition("\t")
    if worker.returncode == 0:
        return int(text), None, spent
    if worker.returncode > 0 or call in STARTING:
        raise SystemExit(f"the fuzzer itself failed at #{text} {call}")
    how = signal.Signals(-worker.returncode).name
    return int(text) + 1, Finding(f"#{text} the process died by {how}", call, ""), spent


def summary(found: list[Finding]) -> str:
    """The findings, those of one place once."""
    first: dict[str, tuple[Finding, int]] = {}
    for finding in found:
        key = re.sub(r"#\d+ |\(.*", "", finding.where)
        first[key] = (first[key][0] if key in first else finding, first.get(key, (finding, 0))[1] + 1)
    return "\n".join(
        f"{count} x {finding.where}\n    {finding.call}\n    {finding.what}"
        for finding, count in first.values()
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--specs", type=int, default=24, help="how many specs to compile and use")
    parser.add_argument("--at", type=int, default=0, help="the number of the first call")
    parser.add_argument("--to", type=int, help="the number of the last call")
    given = parser.parse_args()
    count, found = fuzz(60 * given.minutes, given.seed, given.specs, given.at, given.to)
    print(summary(found) or f"{count} calls, nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
