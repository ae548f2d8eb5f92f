"""Triton, a large package, may be left out: everything for CPUs works, and GPU targets say one line."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def python(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment that has all packages of this one but Triton."""
    folder = tmp_path_factory.mktemp("lean")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for kind in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(kind)).iterdir():
            mine = site / entry.name
            if "triton" not in entry.name and "kvgen" not in entry.name and not mine.exists():
                mine.symlink_to(entry)
    (site / "kvgen.pth").write_text(f"{repo_root}\n")
    return folder / "bin" / "python"


def run(python: Path, root: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *words], cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def test_all_that_is_for_cpus_works(python: Path, repo_root: Path, tmp_path: Path) -> None:
    done = run(python, repo_root, Path(__file__).with_name("without_triton.py"), tmp_path / "out")
    assert done.returncode == 0, done.stderr[-4000:]
    needs = "GPU targets and the interpreter need (CPU targets do not); try: pip install 'triton>=3.6'"
    assert done.stdout.splitlines() == [f"{python} has no triton, which {needs}"] * 3


def test_a_command_for_gpus_ends_with_one_line(python: Path, repo_root: Path, tmp_path: Path) -> None:
    spec = repo_root / "examples/llama3-8b-int8.toml"
    done = run(
        python, repo_root, "-m", "kvgen", "export", spec, "--to", tmp_path / "out", "--target", "sm_90"
    )
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "has no triton" in line
