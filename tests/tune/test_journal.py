"""The log of trials: found again by key, read back after any kill, set aside when it is something else."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.paths import CacheWarning
from kvgen.tune.journal import Journal

HEAD = {"op": "decode", "target": "cpu", "reads": {"page_size": 16}, "pins": {}, "device": "some CPU"}
FACTS = {"outcome": "ok", "message": "", "seconds": 1.5, "limit_s": 20.0}


def filled(path: Path, count: int = 3) -> Journal:
    journal = Journal(path, HEAD)
    for i in range(count):
        journal.add("check", {"binary": str(i)}, **FACTS)
    return journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "decode__12345678.trials.jsonl"


def is_json(text: bytes) -> bool:
    """Whether a line did not break off. That it ends with a brace says nothing: there are inner ones."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.fixture
def calm() -> Iterator[None]:
    """No warning is allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("calm")
def test_what_is_added_is_known_at_once_and_later(path: Path) -> None:
    journal = filled(path)
    assert journal.known("check", {"binary": "1"})
    assert journal.used == {}, "what this run has found out itself is not resumed"
    again = Journal(path, HEAD)
    found = again.known("check", {"binary": "1"})
    assert found is not None and found["seconds"] == 1.5
    again.known("check", {"binary": "1"})
    assert again.used == {"check": 1}
    assert again.known("build", {"binary": "1"}) is None
    assert again.known("check", {"binary": "1", "device": "other"}) is None
    assert len(path.read_text().splitlines()) == 1 + 3, "a head, and a line each"


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_breaks_off_is_skipped_and_the_rest_used(path: Path, cut: int) -> None:
    filled(path)
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path, HEAD)
    assert journal.known("check", {"binary": "1"})
    assert journal.known("check", {"binary": "2"}) is None
    assert "breaks off" in journal.notes[0]
    journal.add("check", {"binary": "3"}, **FACTS)
    later = Journal(path, HEAD)
    assert not later.notes, "said once"
    assert later.known("check", {"binary": "1"}) and later.known("check", {"binary": "3"})


@given(st.data())
def test_no_kill_loses_a_whole_line(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("kills") / "decode__12345678.trials.jsonl"
    written = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            journal = Journal(path, HEAD)
            whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
            lines = [json.loads(text) for text in whole if is_json(text)]
            for line in lines:
                if line["kind"] == "check":
                    assert journal.known("check", line["key"])
            for _ in range(2):
                journal.add("check", {"binary": str(written)}, **FACTS)
                written += 1
            size = path.stat().st_size
            os.truncate(path, data.draw(st.integers(max(0, size - 150), size)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "garbage",
        lambda text: "\0" * 500,
        lambda text: text + "\0\0\0",
        lambda text: "[]\n",
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"op": "decode"', '"op": "prefill"'),
        lambda text: text.replace('"page_size": 16', '"page_size": 32'),
        lambda text: text.replace("some CPU", "another CPU"),
        lambda text: text.replace('"seconds": 1.5', '"seconds": "soon"', 1),
        lambda text: text.replace('"seconds": 1.5', '"seconds": NaN', 1),
        lambda text: text.replace('"kind": "check"', '"kind": "cheque"', 1),
        lambda text: "\n".join(text.splitlines()[1:]) + "\n",
        lambda text: text[:100] + text[150:],
        lambda text: "[" * 100_000 + "\n",
    ],
)
def test_another_file_is_set_aside_and_said(path: Path, spoil: Any) -> None:
    filled(path)
    before = path.read_text()
    path.write_text(spoil(before))
    spoilt = path.read_bytes()
    assert spoilt.decode() != before
    with pytest.warns(CacheWarning, match=path.name) as caught:
        journal = Journal(path, HEAD)
    assert len(caught) == 1
    assert path.with_name(path.name + ".bad-0").read_bytes() == spoilt, "never lost"
    assert journal.known("check", {"binary": "1"}) is None
    journal.add("check", {"binary": "1"}, **FACTS)
    assert Journal(path, HEAD).known("check", {"binary": "1"})


def test_a_disk_that_fills_costs_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(path)
    monkeypatch.setattr(os, "write", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.warns(CacheWarning, match="not logged"):
        journal.add("check", {"binary": "3"}, **FACTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        journal.add("check", {"binary": "4"}, **FACTS)
    assert journal.known("check", {"binary": "4"}), "this run still knows"


def test_an_error_that_is_no_full_disk_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(path)
    monkeypatch.setattr(os, "write", lambda *given: (_ for _ in ()).throw(OSError(errno.EBADF, "bad")))
    with pytest.raises(OSError, match="bad"):
        journal.add("check", {"binary": "3"}, **FACTS)
