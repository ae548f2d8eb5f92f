"""A run that is killed loses nothing that was finished: the next one does not do it again, and says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def start(root: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tune.interrupted", str(folder)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the log."""
    for path in folder.rglob("*.trials.jsonl"):
        return [json.loads(text) for text in path.read_text().split("\n")[:-1] if text.endswith("}")]
    return []


def kinds(folder: Path) -> Counter[str]:
    return Counter(line["kind"] for line in lines(folder))


def kill_when(root: Path, folder: Path, kind: str, count: int) -> None:
    """Run until the log holds so many lines of a kind, then SIGKILL."""
    process = start(root, folder)
    end = time.monotonic() + 240
    while kinds(folder)[kind] < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not list(folder.rglob("decode__*.json")), "it was killed before it had a winner"


def test_a_killed_run_resumes(repo_root: Path, tuning: Path) -> None:
    kill_when(repo_root, tuning, "check", 2)
    checked = kinds(tuning)
    kill_when(repo_root, tuning, "time", 3)
    timed = kinds(tuning)
    assert timed["build"] >= checked["build"] >= 2 and timed["check"] >= checked["check"] >= 2
    (log,) = tuning.rglob("*.trials.jsonl")
    with log.open("ab") as stream:
        stream.write(b'{"kind": "time", "key": {"bin')  # as a kill in the middle of a write leaves it

    process = start(repo_root, tuning)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    (decode,) = json.loads(output)["ops"]
    found = lines(tuning)
    # Nothing with the same key was done twice: what was done would have been logged.
    names = [json.dumps([line["kind"], line["key"]], sort_keys=True) for line in found if "key" in line]
    assert len(set(names)) == len(names)
    # All that was known is told to have been spared.
    assert decode["resumed"]["build"] == timed["build"]
    assert decode["resumed"]["check"] == timed["check"]
    assert decode["resumed"]["time"] == timed["time"]
    assert "breaks off" in decode["notes"][0]
    assert not decode["cached"] and decode["winner"]
    ends = [line for line in found if line["kind"] == "trial"]
    assert len(ends) == sum(decode["outcomes"].values())
    # Of the whole there is a record now, and a further run only finds it.
    process = start(repo_root, tuning)
    output, errors = process.communicate(timeout=240)
    assert json.loads(output)["ops"][0]["cached"], errors
    assert len(lines(tuning)) == len(found)


@pytest.mark.usefixtures("hurry")
def test_nothing_is_run_again(tuning: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a whole log and no winner, a run asks neither the compiler nor the worker for anything."""
    from kvgen.backends.cpu import toolchain
    from kvgen.tune import moves
    from kvgen.tune.remote import Remote
    from kvgen.tune.tuner import tune
    from tests.support.faults import Faulty, small

    monkeypatch.setattr(moves, "neighbours", lambda *given: iter(()))

    def run() -> Any:
        (op,) = tune(small(), ops=["append"], cache_dir=tuning, backend=Faulty(lambda plan, text: text)).ops
        return op

    first = run()
    for path in tuning.rglob("append__*.json"):
        path.unlink()

    def refuse(*given: Any, **more: Any) -> Any:
        raise AssertionError("it was known")

    monkeypatch.setattr(toolchain, "_compile_into", refuse)
    monkeypatch.setattr(Remote, "_ask", refuse)
    second = run()
    (log,) = tuning.rglob("*.trials.jsonl")
    assert (second.winner, second.outcomes) == (first.winner, first.outcomes)
    assert second.resumed["check"] >= 1 and second.resumed["time"] >= 1
    # Except what an earlier run laid to candidates that were not to blame.
    texts = [text.replace('"outcome": "ok"', '"outcome": "crash"') for text in log.read_text().splitlines()]
    checks = [text.replace('"message": ""', '"message": "killed by SIGKILL"') for text in texts]
    for path in tuning.rglob("append__*.json"):
        path.unlink()
    log.write_text("".join(f"{text}\n" for text in checks if '"kind": "build"' not in text))
    monkeypatch.undo()
    (third,) = tune(small(), ops=["append"], cache_dir=tuning, backend=Faulty(lambda plan, text: text)).ops
    assert third.outcomes == first.outcomes and "check" not in third.resumed
