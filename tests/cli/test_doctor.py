"""``kvgen doctor``: facts, hints, and exit code 1 only where nothing works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgen.commands import machine
from kvgen.commands.finding import Finding


def values(data: dict[str, Any]) -> dict[str, str]:
    return {found["name"]: found["value"] for found in data["findings"]}


def test_this_machine(kvgen_json: Any) -> None:
    data = kvgen_json("doctor")
    found = values(data)
    for name in ("python", "numpy", "compiler", "best target", "cores", "memory", "large pages", "folder"):
        assert found[name]
    assert data["usable"]["generate"] == "sources for every target"
    assert found["cpu-portable"].startswith("yes")


def test_no_compiler(kvgen_json: Any, kvgen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    data = kvgen_json("doctor")
    assert values(data)["compiler"] == "none works"
    assert data["usable"]["cpu"] == "" and data["usable"]["generate"]
    assert any(hint.startswith("compiler: ") and "Install one" in hint for hint in data["hints"])
    assert "Hints" in kvgen("doctor").stdout


def test_a_broken_explicit_compiler_is_named(kvgen_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CXX", "no-such-compiler")
    (hint,) = [hint for hint in kvgen_json("doctor")["hints"] if hint.startswith("compiler: ")]
    assert "no-such-compiler (from KVGEN_CXX): not found" in hint


def test_unwritable_cache(kvgen_json: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    data = kvgen_json("doctor")
    assert values(data)["folder"].endswith("cannot be written (Not a directory)")
    assert values(data)["free space"] == "unknown"
    assert any("KVGEN_CACHE_DIR" in hint for hint in data["hints"])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_whose_permissions_promise_too_much(
    kvgen_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc is a folder that root may write to by its bits, has no room, and takes no file."""
    monkeypatch.setenv("KVGEN_CACHE_DIR", "/proc/kvgen")
    data = kvgen_json("doctor")
    assert values(data)["folder"].startswith("/proc/kvgen: cannot be written")
    assert values(data)["free space"] == "unknown"
    assert not any("nearly full" in hint for hint in data["hints"])


def test_nothing_works(kvgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = [Finding("Python", name, "missing", "pip install") for name in machine.PACKAGES]
    monkeypatch.setattr(machine, "SECTIONS", (lambda: absent,))
    result = kvgen("doctor")
    assert result.exit_code == 1
    assert "pip install" in result.stdout


def test_a_thread_count_that_is_none_is_reported(kvgen_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_NUM_THREADS", "many")
    (hint,) = [hint for hint in kvgen_json("doctor")["hints"] if hint.startswith("cores: ")]
    assert "KVGEN_NUM_THREADS = 'many'" in hint


def test_missing_extras_say_how_to_get_them(kvgen_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.EXTRAS, "no-such-package", "weights; pip install no-such-package")
    data = kvgen_json("doctor")
    assert values(data)["no-such-package"] == "missing"
    assert "no-such-package: weights; pip install no-such-package" in data["hints"]
