"""What kvgen bench --gpu-check says: before there is a folder, of a result, and of one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvgen.cli import app
from kvgen.commands import gpu_check
from kvgen.gpu_check import check as checks


def result(conforms: bool) -> dict[str, Any]:
    wrong = {"op": "decode", "variant": "multi", "ok": conforms, "error": 0.5, "message": "q [1]: error 0.5"}
    timing = {"us": 41.5, "spread": 0.01, "gb_per_s": 3200.0, "of_copy": 0.91, "ratio": 1.0}
    return {
        "device": {"name": "Stand-in GPU", "target": "sm_90"},
        "copy_gb_per_s": 3500.0,
        "seconds": 12.5,
        "specs": [
            {
                "spec": "llama",
                "conforms": conforms,
                "checks": [wrong],
                "tuned": [{"op": "decode", "speedup": 1.25, "times": [1, 2], "winner": {"tile": 64}}],
                "records": ["autotune_cache/sm_90/decode__12345678.json"],
                "rows": [{"op": "decode", "case": "8x4096", "contender": "kvgen", **timing}],
            }
        ],
        "skipped": [{"what": "flex", "reason": "no compiler"}],
    }


def test_a_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "check", lambda folder, **options: result(True))
    gpu_check.run("somewhere", [])
    text = capsys.readouterr().out
    assert "Stand-in GPU (sm_90), copy 3,500 GB/s" in text and "left out: flex: no compiler" in text
    assert "1 records, to be copied" in text and "decode__12345678.json" in text
    assert all(words in text for words in ("all right", "1.25", "tile=64", "8x4096", "41.5", "0.91"))
    gpu_check.run("somewhere", [], as_json=True)
    assert json.loads(capsys.readouterr().out) == result(True)


def test_a_wrong_kernel_is_a_bad_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "check", lambda folder, **options: result(False))
    with pytest.raises(typer.Exit) as left:
        gpu_check.run("somewhere", [])
    assert left.value.exit_code == 1
    text = capsys.readouterr().out
    assert "conformance failed in 1" in text and "decode multi: q [1]: error 0.5" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a.toml",), "to change that, --prepare"),
        (("--prepare",), "SPEC: none given"),
        (("--prepare", "--target", "gfx942", "examples/llama3-8b-bf16.toml"), "give an NVIDIA target"),
        ((), "prepare the folder again"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], words: str, tmp_path: Path, repo_root: Path) -> None:
    paths = [str(repo_root / a) if a.startswith("examples") else a for a in arguments]
    monkeyed = [*paths, "--gpu-check", str(tmp_path / "folder")]
    done = CliRunner().invoke(app, ["bench", *monkeyed])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split()) or "can use no GPU here" in done.output
