"""The cache folder: which one, what happens when it cannot be used, and files that appear whole."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvgen import paths


@pytest.fixture(autouse=True)
def fresh_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning given yet, no temporary folder made yet."""
    monkeypatch.setattr(paths, "_warned", set())
    monkeypatch.setattr(paths, "_temporary", None)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVGEN_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/kvgen"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/kvgen"),
        ({"KVGEN_CACHE_DIR": "", "HOME": "/h"}, "/h/.cache/kvgen"),
        ({"HOME": ""}, None),
        ({}, None),
    ],
)
def test_the_environment_names_the_folder(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None
) -> None:
    for name in ("KVGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert paths.configured_root() == (Path(expected) if expected else None)


def test_subfolders_are_made(own_cache_dir: Path) -> None:
    for name in paths.SUBFOLDERS:
        folder = paths.subfolder(name)
        assert folder == own_cache_dir / name
        assert list(folder.iterdir()) == []  # the probe file is gone
    with pytest.raises(ValueError, match="expected one of build, tune, triton"):
        paths.subfolder("other")


def test_without_home_a_temporary_folder_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(paths.CacheWarning, match="Set KVGEN_CACHE_DIR") as caught:
        first, second = paths.subfolder("build"), paths.subfolder("tune")
    assert len(caught) == 1
    assert first.parent == second.parent
    assert first.is_dir()


def test_a_folder_that_cannot_exist_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(paths.CacheWarning, match=r"file/cache: it cannot be written \(Not a directory\)"):
        folder = paths.subfolder("build")
    paths.write_atomic(folder / "x", b"1")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_no_file_is_replaced(
    own_cache_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.write

    def refuse(handle: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", real)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.warns(paths.CacheWarning, match=os.strerror(number)):
        folder = paths.writable(own_cache_dir)
    assert folder != own_cache_dir
    assert list(own_cache_dir.iterdir()) == []


def test_another_error_is_not_mistaken_for_an_unwritable_folder(
    own_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int, data: bytes) -> int:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="broken disk"):
        paths.writable(own_cache_dir)


def test_write_atomic_replaces_whole_and_respects_the_umask(tmp_path: Path) -> None:
    target = tmp_path / "file.json"
    old = os.umask(0o022)
    try:
        paths.write_atomic(target, "old")
        paths.write_atomic(target, "größer")
    finally:
        os.umask(old)
    assert target.read_bytes() == "größer".encode()
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_write_atomic_leaves_nothing_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def fail(source: Path, destination: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        paths.write_atomic(target, b"new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_set_aside_numbers_and_keeps(tmp_path: Path) -> None:
    target = tmp_path / "entry"
    for number, content in enumerate(["first", "second"]):
        target.write_text(content)
        with pytest.warns(paths.CacheWarning, match="too short; set aside"):
            moved = paths.set_aside(target, "too short")
        assert moved == tmp_path / f"entry.bad-{number}"
        assert moved.read_text() == content
    target.mkdir()
    with pytest.warns(paths.CacheWarning):
        assert paths.set_aside(target, "a folder too") == tmp_path / "entry.bad-2"


def test_set_aside_of_what_is_gone_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paths.set_aside(tmp_path / "gone", "whatever") is None


def test_set_aside_that_cannot_rename_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "entry"
    target.write_text("kept")

    def refuse(source: Path, destination: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.warns(paths.CacheWarning, match="left in place"):
        assert paths.set_aside(target, "truncated") is None
    assert target.read_text() == "kept"


def test_the_toolchain_imports_without_torch(repo_root: Path) -> None:
    """``kvgen --help`` must be quick, and a machine without torch must be able to compile."""
    code = (
        "import sys, kvgen.paths, kvgen.backends.cpu.read_limit, kvgen.backends.cpu.batch\n"
        "print([m for m in ('torch', 'triton', 'sympy', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
