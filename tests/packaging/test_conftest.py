"""The promises of tests/conftest.py, checked in pytest runs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_pytest(repo_root: Path, folder: Path, body: str, *args: str, patch: str = "", **env: str) -> str:
    """Runs ``body`` as a test module beside a copy of our conftest; returns what pytest printed."""
    folder.mkdir(exist_ok=True)
    (folder / "conftest.py").write_text((repo_root / "tests/conftest.py").read_text() + patch)
    (folder / "test_it.py").write_text(body)
    settings = repo_root / "pyproject.toml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(settings),
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
    ]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVGEN_", "PYTEST_")) and k != "CI"}
    done = subprocess.run(
        [*command, *args, str(folder)],
        env=clean | env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


CACHE_TEST = """
import os, pathlib
def test_cache():
    pathlib.Path(os.environ["KVGEN_CACHE_DIR"], "touched").write_text("x")
    assert "KVGEN_LOG" not in os.environ
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["plain", "xdist"])
def test_tests_never_see_the_users_cache(repo_root: Path, tmp_path: Path, workers: tuple[str, ...]) -> None:
    users = tmp_path / "users"
    users.mkdir()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"KVGEN_CACHE_DIR": str(users), "KVGEN_LOG": "debug", "TMPDIR": str(temporary)}
    output = run_pytest(repo_root, tmp_path / "t", CACHE_TEST, *workers, **env)
    assert "1 passed" in output
    assert not list(users.iterdir())
    assert not list(temporary.glob("kvgen-tests-*")), "the temporary cache was left behind"


def test_the_cache_can_be_kept(repo_root: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert "1 passed" in run_pytest(repo_root, tmp_path / "t", CACHE_TEST, KVGEN_TEST_CACHE_DIR=str(kept))
    assert [path.name for path in kept.iterdir()] == ["touched"]


MARKS = """
import pytest
@pytest.mark.isa("cpu-portable")
@pytest.mark.isa("avx2")
def test_both_rows_are_there(): pass
@pytest.mark.isa("avx2")
@pytest.mark.isa("avx512")
def test_one_row_is_not(): raise AssertionError
@pytest.mark.gpu
def test_gpu(): raise AssertionError
@pytest.mark.slow
def test_slow(): raise AssertionError
def test_golden(update_golden): assert update_golden
"""


def test_markers_skip_with_a_reason(repo_root: Path, tmp_path: Path) -> None:
    old_machine = 'cpu_flags = lambda: frozenset(ROWS["avx2"])\nwhy_no_gpu = lambda: "too old"\n'
    output = run_pytest(repo_root, tmp_path / "t", MARKS, "--update-golden", patch=old_machine)
    assert "2 passed, 2 skipped, 1 deselected" in output
    assert "needs the CPU row avx512; " in output
    assert "lacks avx512f avx512bw" in output
    assert "needs a GPU: too old" in output


def test_a_misspelt_row_is_an_error(repo_root: Path, tmp_path: Path) -> None:
    body = 'import pytest\n@pytest.mark.isa("avx5l2")\ndef test_x(): pass\n'
    assert "isa('avx5l2'): no such CPU row" in run_pytest(repo_root, tmp_path / "t", body)


def test_golden_files_are_not_rewritten_in_ci(repo_root: Path, tmp_path: Path) -> None:
    assert "not in CI" in run_pytest(repo_root, tmp_path / "t", MARKS, "--update-golden", CI="true")


def test_the_rows_are_those_of_kvgen() -> None:
    """A test marked isa("avx512") must run where, and only where, kvgen would run that row's kernels."""
    from kvgen.backends.cpu import isa
    from tests import conftest

    words = {name: word for name, (word, _) in isa.FEATURES.items()}
    for name, row in isa.ROWS.items():
        assert set(conftest.ROWS[name]) == {words[feature] for feature in row.required}, name
        for feature in row.optional:
            assert conftest.ROWS[feature] == (words[feature],), feature
