"""Standard streams that the caller closed or that are full: the answer where it can go, no traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = "show examples/llama3-8b-int8.toml"


def shell(root: Path, words: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """``kvgen words redirection``, as a shell runs it."""
    command = f"{shlex.quote(sys.executable)} -m kvgen {words} {redirection}"
    return subprocess.run(
        ["sh", "-c", command], cwd=root, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("words", [SHOW, f"{SHOW} --json", "--help"])
def test_closed_streams(repo_root: Path, words: str) -> None:
    whole = shell(repo_root, words, "")
    assert whole.returncode == 0 and whole.stdout
    for redirection, shown in (
        (">&-", ""),
        ("2>&-", whole.stdout),
        ("<&-", whole.stdout),
        (">&- 2>&- <&-", ""),
    ):
        done = shell(repo_root, words, redirection)
        assert (done.returncode, done.stdout, done.stderr) == (0, shown, ""), redirection


def test_an_error_with_a_closed_stream(repo_root: Path) -> None:
    done = shell(repo_root, "show nothing", ">&-")
    assert done.returncode == 2 and done.stderr.startswith("error: nothing: no such file")
    done = shell(repo_root, "show nothing --json", "2>&-")
    assert done.returncode == 2 and '"SpecError"' in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [SHOW, f"{SHOW} --json", "--help"])
def test_full_output(repo_root: Path, words: str) -> None:
    done = shell(repo_root, words, ">/dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_error_that_is_no_json_for_want_of_room_is_told_as_text(repo_root: Path) -> None:
    done = shell(repo_root, "show nothing --json", ">/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: nothing: no such file") and "Traceback" not in done.stderr
