"""``make demo`` says what it does from its first line, and its tables are about the spec that it names."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.bench.cases import CASES
from kvgen.bench.peers.registry import PEERS

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def planned(repo_root: Path, *words: str) -> list[str]:
    """What make would run, a line each."""
    done = subprocess.run(
        ["make", "-n", "-C", str(repo_root), f"PYTHON={sys.executable}", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if not line.startswith("make")]


def test_setting_up_says_what_is_fetched_and_how_much(repo_root: Path, tmp_path: Path) -> None:
    lines = planned(repo_root, "demo", f"VENV={tmp_path / 'venv'}")
    said = next(i for i, line in enumerate(lines) if line.startswith("echo"))
    pip = next(i for i, line in enumerate(lines) if "pip install" in line)
    venv = next(i for i, line in enumerate(lines) if "-m venv" in line)
    assert said < venv < pip and "GB" in lines[said]
    assert "--quiet" not in lines[pip] and "-q " not in lines[pip], "pip says what it does"


def test_the_demo_tunes_and_compares_one_spec(repo_root: Path) -> None:
    lines = planned(
        repo_root, "demo", "VENV=none", "SPEC=examples/llama3-8b-bf16.toml", "TARGET=cpu-portable"
    )
    tune, bench = (next(line for line in lines if f" {word} examples/" in line) for word in ("tune", "bench"))
    for line in (tune, bench):
        assert "examples/llama3-8b-bf16.toml --target cpu-portable" in line
    (peer,) = re.findall(r"--peers (\S+)", bench)
    assert PEERS[peer].where == "sdpa:Gathered", "a plain loop over pages"
    assert set(re.findall(r"--case (\S+)", bench)) <= set(CASES)
    assert lines.index(tune) - 1 == next(i for i, line in enumerate(lines) if line.startswith('echo "1 of 2'))
