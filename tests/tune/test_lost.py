"""The cache of builds is emptied while the tuner works: no candidate is to blame or called wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen import paths
from kvgen.backends.cpu import batch
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.errors import ToolchainError
from kvgen.tune.outcome import OpReport, Outcome
from kvgen.tune.remote import Remote
from kvgen.tune.tuner import tune
from tests.support.faults import small

pytestmark = pytest.mark.usefixtures("hurry", "own_cache_dir")


def run(folder: Path) -> OpReport:
    (decode,) = tune(small(), ops=["decode"], cache_dir=folder, backend=CpuBackend("-O1")).ops
    return decode


def empty_before(monkeypatch: pytest.MonkeyPatch, method: str, rounds: int) -> list[int]:
    """Remove the builds before this request, the first times that it is made, in a worker that knows none.

    Returns how many times are left.
    """
    ask, left = getattr(Remote, method), [rounds]

    def emptied(self: Remote, *given: Any, **more: Any) -> Any:
        if left[0]:
            left[0] -= 1
            shutil.rmtree(paths.subfolder("build"))
            self._stop()  # it would still have loaded what it has checked
        return ask(self, *given, **more)

    monkeypatch.setattr(Remote, method, emptied)
    return left


@pytest.mark.parametrize("method", ["check", "race", "duel"])
def test_a_build_that_is_gone_is_made_again(
    tuning: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    only({"heads": 1})
    if method == "duel":  # there are none unless a rival looks faster
        monkeypatch.setattr(
            Remote, "race", lambda self, op, sizes, contenders, **given: [1.0, 0.5][: len(contenders)]
        )
    left = empty_before(monkeypatch, method, 1)
    decode = run(tuning)
    assert left == [0]
    assert [trial.outcome for trial in decode.trials] == [Outcome.OK, Outcome.OK]


def test_what_stays_gone_is_lost_and_tried_again_by_a_later_run(
    tuning: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only({"heads": 1})
    with monkeypatch.context() as patch:
        empty_before(patch, "check", 1 << 30)
        with pytest.raises(ToolchainError, match=r"ended as lost: Unloadable: .*no readable sidecar"):
            run(tuning)
    (log,) = tuning.rglob("*.trials.jsonl")
    checks = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "check"]
    assert {line["outcome"] for line in checks} == {"lost"}
    decode = run(tuning)
    assert [trial.outcome for trial in decode.trials] == [Outcome.OK, Outcome.OK]
    assert "check" not in decode.resumed


def test_what_older_versions_called_wrong_for_it_is_checked_again(
    tuning: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only()
    run(tuning)
    (log,) = tuning.rglob("*.trials.jsonl")
    texts = []
    for line in map(json.loads, log.read_text().splitlines()):
        if line["kind"] in ("check", "time"):
            line["key"]["protocol"] = 1
            line |= {"outcome": "wrong", "message": "ToolchainError: x.so: no readable sidecar x.json"}
        texts.append(json.dumps(line) + "\n")
    log.write_text("".join(texts))
    for winners in tuning.rglob("decode__*.json"):
        winners.unlink()
    assert [trial.outcome for trial in run(tuning).trials] == [Outcome.OK]


def test_a_build_that_goes_as_it_ends_is_lost(
    tuning: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only({"heads": 1})
    build = batch.build

    def fleeting(job: Any, **given: Any) -> Path:
        path = build(job, **given)
        if not seen:
            seen.append(path)
            shutil.rmtree(path.parent)
        return path

    seen: list[Path] = []
    monkeypatch.setattr(batch, "build", fleeting)
    decode = run(tuning)
    assert sorted(trial.outcome for trial in decode.trials) == [Outcome.LOST, Outcome.OK]
    (log,) = tuning.rglob("*.trials.jsonl")
    builds = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "build"]
    assert str(seen[0]) not in json.dumps(builds)
