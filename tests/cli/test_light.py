"""Help is quick because little is imported; list, show and explain need neither torch nor a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

INT8 = "examples/llama3-8b-int8.toml"
HEAVY = ("jinja2", "numpy", "rich", "sympy", "torch", "triton")

# Runs a command in this interpreter, then says which of the packages it has imported.
WATCH = """
import sys
from kvgen.cli import main
sys.argv = ["kvgen", *sys.argv[2:]]
watched, code = {heavy}, 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
print("IMPORTED", *[name for name in watched if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""

# As above, with packages made absent, as on a machine that lacks them.
WITHOUT = """
import sys
for name in {absent}:
    sys.modules[name] = None
from kvgen.cli import main
sys.argv = ["kvgen", *sys.argv[2:]]
main()
"""


def run(root: Path, code: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, "--", *words]
    return subprocess.run(
        command, cwd=root, env={**env} or None, capture_output=True, text=True, check=False, timeout=120
    )


def imported(root: Path, *words: str) -> list[str]:
    done = run(root, WATCH.format(heavy=HEAVY), *words)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list", "--help"], ["tune", "--help"]])
def test_help_imports_nothing_heavy(repo_root: Path, words: list[str]) -> None:
    assert imported(repo_root, *words) == []


@pytest.mark.parametrize("section", ["targets", "formats", "specs", "schedules"])
def test_list_imports_nothing_heavy(repo_root: Path, section: str) -> None:
    assert imported(repo_root, "list", section) == []


def test_list_and_show_do_without_the_compiler_front_end(repo_root: Path) -> None:
    assert imported(repo_root, "list") == ["numpy"]
    assert imported(repo_root, "show", INT8) == []


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show", INT8],
        ["explain", INT8],
        ["explain", INT8, "--target", "sm_90"],
        ["explain", INT8, "--target", "interpret", "--op", "append"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_without_torch_triton_and_compiler(repo_root: Path, tmp_path: Path, words: list[str]) -> None:
    code = WITHOUT.format(absent=("torch", "triton"))
    done = run(repo_root, code, *words, PATH=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_generate_without_torch_triton_and_compiler(repo_root: Path, tmp_path: Path) -> None:
    code = WITHOUT.format(absent=("torch", "triton"))
    words = ["generate", INT8, "--target", "sm_90", "--to", str(tmp_path / "out")]
    done = run(repo_root, code, *words, PATH=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_resources_without_a_compiler(repo_root: Path, tmp_path: Path) -> None:
    code = WITHOUT.format(absent=())
    words = ["explain", INT8, "--op", "copy", "--stage", "resources"]
    done = run(repo_root, code, *words, PATH=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == 2
    assert "no working C++ compiler" in done.stderr and "Traceback" not in done.stderr


def test_module_and_version(kvgen_process: Any) -> None:
    import kvgen

    assert kvgen_process("--version").stdout == f"kvgen {kvgen.__version__}\n"
    help_text = kvgen_process("--help").stdout
    for command in ("tune", "list", "show", "explain", "generate", "verify", "doctor"):
        assert f"  {command} " in help_text
    assert "\x1b" not in help_text
