"""An export is whole, the former or the new one, wherever a run is killed; and the next run always works."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvgen.errors import ArgumentError
from kvgen.export import placing

KILLED = Path(__file__).with_name("killed.py")


@pytest.mark.parametrize("how", ["exchange", "moves"])
def test_killed_at_every_step(tmp_path: Path, how: str, repo_root: Path) -> None:
    if how == "exchange" and not exchanges(tmp_path):
        pytest.skip("this file system cannot exchange folders")
    command = [sys.executable, KILLED, tmp_path / "work", how]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, count = done.stdout.splitlines()
    assert [line for line in lines if not line.endswith(": fine")] == []
    steps = {line.split()[2] for line in lines if len(line.split()) > 3}
    assert {"mkdir", "open", "rename", "unlink", "rmdir"} <= steps and int(count) > 80
    assert how != "exchange" or "exchange:" in steps


def exchanges(folder: Path) -> bool:
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    return placing._exchange(folder / "one", folder / "two")


def test_what_comes_to_lie_there_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    asked = []

    def check(folder: Path) -> None:
        asked.append(folder)
        if len(asked) == 1:
            (target / "thesis.txt").write_text("years")
        elif (folder / "thesis.txt").exists():
            raise ArgumentError("thesis.txt")

    for _ in range(2):  # between the two looks, and before the first of the next run
        with pytest.raises(ArgumentError, match=r"thesis\.txt"):
            placing.put(target, {"new": b"new"}, check)
    assert sorted(os.listdir(target)) == ["old", "thesis.txt"] and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EXDEV])
def test_a_mount_is_refused(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ArgumentError, match=r"to = .*out': it cannot be moved .* give a folder in it"):
        placing.put(tmp_path / "out", {"new": b"new"}, lambda folder: None)
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(placing, "_create", fail)
    with pytest.raises(OSError, match="No space"):
        placing.put(tmp_path / "a" / "b" / "out", {"new": b"new"}, lambda folder: None)
    assert os.listdir(tmp_path) == []


def test_what_a_living_run_is_writing_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, waiting, go_on = placing._create, threading.Event(), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        create(path, data)
        if data == b"slow":
            waiting.set()
            go_on.wait()

    monkeypatch.setattr(placing, "_create", slow)
    target = tmp_path / "out"
    thread = threading.Thread(
        target=placing.put, args=(target, {"a": b"slow", "b": b"2"}, lambda folder: None)
    )
    thread.start()
    waiting.wait()
    placing.put(target, {"a": b"quick"}, lambda folder: None)
    assert (target / "a").read_bytes() == b"quick"
    go_on.set()
    thread.join()
    assert (target / "a").read_bytes() == b"slow" and os.listdir(tmp_path) == ["out"]


def test_a_library_without_the_call_moves_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    for text in (b"1", b"2"):
        placing.put(tmp_path / "out", {"a": text}, lambda folder: None)
        assert (tmp_path / "out" / "a").read_bytes() == text and os.listdir(tmp_path) == ["out"]
