"""On a terminal: tables and colours that fit its width, and the same facts."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

INT8 = "examples/llama3-8b-int8.toml"


def on_terminal(root: Path, columns: int, *words: str) -> str:
    """What the command writes to a terminal of this width."""
    parent, child = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvgen", *words], cwd=root, env=env, stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    written = bytearray()
    while select.select([parent], [], [], 60)[0]:
        try:
            data = os.read(parent, 65536)
        except OSError:  # Linux: the other end was closed
            break
        if not data:
            break
        written += data
    os.close(parent)
    assert process.wait(timeout=60) == 0
    return written.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    "words", [["list"], ["show", INT8], ["explain", INT8, "--stage", "plan"]], ids=" ".join
)
def test_fits_the_width(repo_root: Path, columns: int, words: list[str]) -> None:
    text = on_terminal(repo_root, columns, *words)
    assert "\x1b[" in text
    assert max(len(line.rstrip()) for line in plain(text).splitlines()) <= columns


def test_source_is_coloured_and_otherwise_untouched(repo_root: Path) -> None:
    from kvgen.commands.options import assembled, read_spec

    text = on_terminal(repo_root, 80, "explain", INT8, "--stage", "source")
    assert "\x1b[" in text
    assert plain(text).rstrip("\n") == assembled(read_spec(INT8), "cpu").source("decode").rstrip("\n")


def test_json_has_no_colours(repo_root: Path) -> None:
    assert "\x1b[" not in on_terminal(repo_root, 80, "show", INT8, "--json")
