"""Finding a compiler that works, and never being left with one that hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvgen.backends.cpu import compiler
from kvgen.backends.cpu.process import CompilerTimeout, invoke
from kvgen.errors import ToolchainError


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def real() -> str:
    return " ".join(compiler.find_compiler().command)


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: str) -> Path:
    """A folder that is the whole PATH of the search, beside an empty cache."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("KVGEN_CXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    # The system's folders stay last, for the tools that the compiler and the scripts call; they hold no
    # compiler that is found first, because the names searched for are shadowed where a test needs it.
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_without_any_compiler_the_error_says_what_was_tried_and_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVGEN_CXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError) as caught:
        compiler.find_compiler()
    message = str(caught.value)
    for part in (
        "g++ (from PATH): not found",
        "clang++",
        "c++",
        "apt-get install g++",
        "dnf install",
        "conda install",
    ):
        assert part in message


def test_the_install_line_fits_the_system(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(bin_dir / "dnf", "exit 0")
    monkeypatch.setenv("PATH", str(bin_dir))
    assert compiler.install_hint() == "Install one: dnf install gcc-c++"


def test_kvgen_cxx_is_binding(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match=r"no-such-compiler \(from KVGEN_CXX\): not found") as caught:
        compiler.find_compiler()
    assert "g++ (from PATH)" not in str(caught.value)


def test_a_compiler_that_cannot_link_openmp_is_passed_over(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch, real: str
) -> None:
    script(
        bin_dir / "g++",
        f'case "$*" in *-fopenmp*) echo "ld: cannot find -lgomp" >&2; exit 1;; esac\nexec {real} "$@"',
    )
    script(bin_dir / "clang++", f'exec {real} "$@"')
    found = compiler.find_compiler()
    assert found.command == (str(bin_dir / "clang++"),)
    monkeypatch.setenv("KVGEN_CXX", "g++")
    with pytest.raises(ToolchainError, match="cannot build an OpenMP shared object: ld: cannot find -lgomp"):
        compiler.find_compiler()


def test_cxx_comes_first_and_may_have_arguments(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch, real: str
) -> None:
    wrapper = script(bin_dir / "wrap", f'[ "$1" = "--for-kvgen" ] && shift && exec {real} "$@"\nexit 3')
    monkeypatch.setenv("CXX", f"{wrapper} --for-kvgen")
    assert compiler.find_compiler().command == (str(wrapper), "--for-kvgen")
    monkeypatch.setenv("CXX", f"{wrapper} --other")
    assert compiler.find_compiler().command != (str(wrapper), "--other")  # broken: the search goes on
    monkeypatch.setenv("KVGEN_CXX", "g++ 'unclosed")
    with pytest.raises(ToolchainError, match="not a command line"):
        compiler.find_compiler()


def test_a_success_is_remembered_and_a_failure_is_not(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch, real: str
) -> None:
    log = bin_dir / "log"
    wrapper = script(bin_dir / "wrap", f'case "$*" in *probe.cpp*) echo x >> {log};; esac\nexec {real} "$@"')
    found = compiler.identify(str(wrapper))
    compiler.probe(found)
    compiler.probe(found)
    assert log.read_text() == "x\n"
    script(wrapper, f'case "$*" in *probe.cpp*) exit 1;; esac\nexec {real} "$@" # another size')
    for _ in range(2):
        with pytest.raises(ToolchainError):
            compiler.probe(found)


def test_identity_holds_no_path(real: str) -> None:
    found = compiler.find_compiler()
    assert found.command[0] not in found.identity
    assert found.version in found.identity
    assert found.triple in found.identity


def test_a_timeout_kills_the_children_too(tmp_path: Path) -> None:
    slow = script(tmp_path / "slow", f"sleep 60 &\necho $! > {tmp_path}/pid\nwait")
    start = time.monotonic()
    with pytest.raises(CompilerTimeout, match=r"slow was killed after 0.5 s"):
        invoke([str(slow)], cwd=tmp_path, timeout_s=0.5)
    assert time.monotonic() - start < 10
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":  # killed; whoever inherited it has not collected it yet
            break
        time.sleep(0.02)
    else:
        pytest.fail("the compiler's child is still running")


def test_a_program_that_cannot_start_is_a_toolchain_error(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="cannot start"):
        invoke([str(tmp_path / "absent")], cwd=tmp_path, timeout_s=1)


def test_messages_are_english_and_temporary_files_stay_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    done = invoke(["/bin/sh", "-c", "echo $LC_ALL $TMPDIR"], cwd=tmp_path, timeout_s=10)
    assert done.output.split() == ["C", str(tmp_path)]


def test_first_errors_skip_the_noise() -> None:
    output = (
        "In file included from a.cpp:1:\nnote: x\na.cpp:3:1: error: one\n   3 | foo\na.cpp:9:1: error: two\n"
    )
    assert compiler.first_errors(output, 1) == ["a.cpp:3:1: error: one"]
    assert compiler.first_errors("killed\nsignal 9\n") == ["killed", "signal 9"]
