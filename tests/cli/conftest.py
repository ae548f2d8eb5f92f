"""Running ``kvgen`` in this process (quick) or as a process of its own (imports, exit codes, pipes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

Kvgen = Callable[..., Any]


@pytest.fixture
def kvgen(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Kvgen:
    """Call with arguments; returns click's result (``exit_code``, ``stdout``, ``stderr``)."""
    from kvgen.cli import app

    monkeypatch.chdir(repo_root)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def kvgen_json(kvgen: Kvgen) -> Kvgen:
    """Call with arguments; returns the JSON document that ``--json`` printed."""

    def call(*words: object, exit_code: int = 0) -> Any:
        result = kvgen(*words, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return call


@pytest.fixture
def kvgen_process(repo_root: Path) -> Kvgen:
    """Call with arguments; returns the finished process."""

    def call(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvgen", *map(str, words)]
        return subprocess.run(
            command,
            cwd=repo_root,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return call
