"""Codecs and variants of a user's own come from a file or an installed package, in every command."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvgen import definitions
from kvgen.cli import COMMANDS, app
from kvgen.commands.failures import guarded
from kvgen.definitions import DefinitionsWarning, load, load_installed
from kvgen.errors import ArgumentError
from kvgen.ir.codec import CODECS
from kvgen.passes.validate import load_spec
from kvgen.variants import registry

MINE = """
from kvgen.ir.codec import Codec, register
register(Codec("NAME", "table", bits=3, qmax=1.0, levels=(-1.0, -0.6, -0.2, 0.0, 0.2, 0.6, 0.8, 1.0)))
"""

TABLES: tuple[dict[str, Any], ...] = (CODECS, registry._DEFINITIONS, registry._POSITIONS, registry.OWN)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was loaded before, and what a test registers is forgotten."""
    monkeypatch.setattr(definitions, "_loaded", {})
    monkeypatch.setattr(definitions, "_asked", True)
    before = [dict(table) for table in TABLES]
    yield
    for table, held in zip(TABLES, before, strict=True):
        table.clear()
        table.update(held)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("NAME", "sevens"))
    return path


def test_a_file_is_run_once(mine: Path) -> None:
    load(mine)
    load(str(mine))
    assert "sevens" in CODECS
    twin = mine.parent / "other" / "mine.py"
    twin.parent.mkdir()
    twin.write_text(MINE.replace("NAME", "eights"))
    load(twin)
    assert "eights" in CODECS, "another file of that name is another file"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ny = x / 0\n", r"wrong\.py, line 2: ZeroDivisionError: division by zero"),
        ("x = (\n", r"wrong\.py, line 1: SyntaxError"),
        (MINE.replace("NAME", "int8"), r"line 3: ValueError: codec 'int8' is registered already"),
    ],
)
def test_a_file_that_fails_says_where(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(ArgumentError, match=says):
        load(tmp_path / "wrong.py")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    for name, says in (("gone.py", "no such file"), (".", "a folder"), ("mine.toml", "no Python file")):
        with pytest.raises(ArgumentError, match=f"{says}; give a .py file"):
            load(tmp_path / name)


def package(folder: Path, name: str, text: str) -> None:
    """An installed package with an entry point."""
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvgen.definitions]\nown = {name}\n")


def test_installed_packages_bring_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "kvgen_sevens_for_a_test", MINE.replace("NAME", "sevens"))
    package(tmp_path, "kvgen_broken_for_a_test", "import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(definitions, "_asked", False)
    raw = {
        "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64},
        "cache": {"page_size": 16, "k": {"format": "sevens"}, "v": {"format": "sevens"}},
    }
    with pytest.warns(DefinitionsWarning, match="kvgen_broken_for_a_test was left out: ModuleNotFoundError"):
        spec = load_spec(raw)
    assert spec.cache.k.format == "sevens"
    load_installed()  # once: the second call would register it again
    sys.modules.pop("kvgen_sevens_for_a_test")


def test_lists_show_them(mine: Path) -> None:
    result = CliRunner().invoke(app, ["list", "formats", "--import", str(mine)])
    assert result.exit_code == 0 and "sevens" in result.stdout
    assert "sevens" in CODECS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_them(name: str) -> None:
    parameters = inspect.signature(guarded(COMMANDS[name])).parameters
    assert "imports" in parameters
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"})
    assert "--import" in result.output


def test_a_command_refuses_a_wrong_file_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["list", "formats", "--import", str(tmp_path / "gone.py")])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "no such file" in result.stderr
