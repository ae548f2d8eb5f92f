"""Files and texts of others are measured before they are read or parsed."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgen import bounded, paths
from kvgen.backends.cpu import artifact
from kvgen.bench.compare import read_report
from kvgen.bounded import RefusedError
from kvgen.commands import generate
from kvgen.errors import KvgenError
from kvgen.gpu_check import folder
from kvgen.passes.validate import load_spec
from kvgen.runtime import manifest
from kvgen.tune import why
from kvgen.tune.journal import Journal


def test_a_pipe_and_a_device_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="no regular file but a pipe"):
        bounded.read(tmp_path / "pipe", 100)
    with pytest.raises(RefusedError, match="no regular file but a device"):
        bounded.read("/dev/zero", 100)
    with pytest.raises(IsADirectoryError):
        bounded.read(tmp_path, 100)
    with pytest.raises(FileNotFoundError):
        bounded.read(tmp_path / "gone", 100)


def test_a_size_is_compared_before_a_byte_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert bounded.read(path, 5) == bounded.read(path, 9, exactly=5) == b"12345"
    os.truncate(path, 1 << 40)  # a terabyte of holes: to read it would end the process
    with pytest.raises(RefusedError, match=r"1,099,511,627,776 bytes, and at most 5 are read"):
        bounded.read(path, 5)
    with pytest.raises(RefusedError, match=r"1099511627776 bytes instead of 5"):
        bounded.read(path, 1 << 50, exactly=5)


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65, '["]",' * 65, '["\\"]",' * 65],
)
def test_deep_json_is_refused_before_it_is_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda data: pytest.fail("parsed"))
    with pytest.raises(RefusedError, match="more than 64 brackets"):
        bounded.parse_json(text)


def test_ordinary_json_is_parsed(tmp_path: Path) -> None:
    value = {"a": ["[" * 100, '\\"{' * 100, {}], "b": [[1]] * 1000, "deep": json.loads("[" * 60 + "]" * 60)}
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert bounded.read_json(tmp_path / "x.json") == value
    for text in ("", "[", '"', '"\\', "]", "{]", "[1,", "nul"):
        with pytest.raises(ValueError, match=r"."):
            bounded.parse_json(text)


DEEP = [
    ("a" + ".a" * 30_000 + " = 1", "line 1: a name of more than 8 parts"),
    ("\n[a" + ".b" * 30_000 + "]", "line 2: a name of more than 8 parts"),
    ("[[a" + ' . "b"' * 8 + "]]", "line 1: a name of more than 8 parts"),
    ("x = {a" + ".'b'" * 8 + " = 1}", "line 1: a name of more than 8 parts"),
    ('x = """\n\n"""\ny = 1.5\nz' + ".z" * 8 + " = 1", "line 5: a name of more than 8 parts"),
    ("x = " + "[" * 30_000, "more than 64 brackets"),
    ("x = " + "[" * 65 + "]" * 65, "more than 64 brackets"),
    ("x = " + "{a = " * 65, "more than 64 brackets"),
    ("x = 1 # ok\n" * 7_000, "77,000 bytes, and at most 65,536 are read"),
]


@pytest.mark.parametrize(("text", "reason"), DEEP)
def test_toml_is_refused_before_it_is_parsed(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tomllib, "loads", lambda text: pytest.fail("parsed"))
    with pytest.raises(RefusedError, match=reason):
        bounded.parse_toml(text)


def test_ordinary_toml_is_parsed(repo_root: Path) -> None:
    for path in sorted((repo_root / "examples").glob("*.toml")):
        assert bounded.parse_toml(path.read_text()) == tomllib.loads(path.read_text())
    text = (
        "a.b.c.d.e.f.g.h = 1\nx = [" + "1.5, " * 3000 + "]\n# " + "a." * 99 + '\ny = "' + "a.[" * 99 + '"\n'
    )
    text += (
        "z = '''" + "[a.\n" * 99 + "'''\nu = \"\\\"" + "[.a" * 99 + '"\nw = """\\"""' + "[.a" * 99 + '"""\n'
    )
    assert bounded.parse_toml(text) == tomllib.loads(text)


def journal(path: Path) -> object:
    with pytest.warns(paths.CacheWarning, match=r"a pipe|is no log of trials|at most") as caught:
        Journal(path, {"op": "decode"})
    return caught[0].message


READERS: dict[str, tuple[Callable[[Path], object], bool]] = {
    "sidecar": (lambda path: artifact.read_sidecar(path.with_suffix(".so")), True),
    "export": (lambda path: manifest.read_body(path.parent), True),
    "gpu check": (lambda path: folder.read(path.parent), True),
    "report": (lambda path: read_report(str(path)), True),
    "generate": (generate.read_manifest, False),
    "why": (why._read, False),
    "trials": (journal, False),
    "spec": (load_spec, True),
}
"""Who reads a file that somebody else may have written, and whether a bad one is an error."""


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("what", ["deep", "pipe", "large"])
def test_every_reader_is_bounded(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("[" * 200_000 + "\n")
    if what == "large":
        os.truncate(path, 1 << 40)
    monkeypatch.setattr(json, "loads", lambda data: pytest.fail("parsed"))
    monkeypatch.setattr(tomllib, "loads", lambda data: pytest.fail("parsed"))
    read, fails = READERS[name]
    if not fails:
        assert read(path) in ({}, None) or name == "trials"
        return
    with pytest.raises(KvgenError, match=r"64 brackets|a pipe|at most [\d,]+ are read") as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 600
