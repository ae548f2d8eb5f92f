"""``kvgen verify``: each kernel proven, wrong ones named, exit code 1."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from typing import Any

import pytest

from kvgen.errors import ToolchainError
from kvgen.tune import check

INT8, BF16 = "examples/llama3-8b-int8.toml", "examples/llama3-8b-bf16.toml"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="kernels run through torch")


def test_ops_are_proven(kvgen_json: Any) -> None:
    data = kvgen_json("verify", INT8, "--op", "copy", "--op", "append")
    assert data["ok"] is True and data["target"].startswith("cpu-")
    found = [(row["op"], row["variant"]) for row in data["verdicts"]]
    assert found == [("append", "bf16"), ("append", "f16"), ("append", "f32"), ("copy", "")]
    assert all(row["error"] == 0 and row["cases"] > 0 for row in data["verdicts"])


def test_text(kvgen: Any) -> None:
    result = kvgen("verify", BF16, "--op", "merge")
    assert result.exit_code == 0
    assert "3 of 3 kernels proven" in result.stdout and "1e-02" in result.stdout
    assert "building and proving (3)" in result.stderr


def test_a_wrong_kernel_fails(kvgen: Any, kvgen_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is wrong, one does not build: both are named, the third is still proven."""

    def judge(library: Any, op: str, variant: str) -> check.Verdict:
        if variant == "f16":
            raise ToolchainError("g++ refused it")
        ok = variant == "f32"
        return check.Verdict(
            op, variant, ok, "a case", 0.0 if ok else float("nan"), 1e-2, 4, "" if ok else "NaN"
        )

    monkeypatch.setattr(check, "check_op", judge)
    result = kvgen("verify", BF16, "--op", "merge")
    assert result.exit_code == 1
    for text in ("WRONG", "FAILED", "merge bf16: NaN", "merge f16: ToolchainError: g++ refused it", "1 of 3"):
        assert text in result.stdout
    data = kvgen_json("verify", BF16, "--op", "merge", exit_code=1)
    assert data["ok"] is False
    assert [row["ok"] for row in data["verdicts"]] == [False, False, True]
    assert data["verdicts"][0]["error"] == "nan"


def test_verdicts_are_what_the_check_says(kvgen_json: Any) -> None:
    from kvgen.commands.options import assembled, read_spec

    (row,) = kvgen_json("verify", BF16, "--op", "copy")["verdicts"]
    del row["seconds"]
    assert row == asdict(check.check_op(assembled(read_spec(BF16), "cpu"), "copy"))


def test_a_device_that_is_not_here(kvgen: Any) -> None:
    """No machine has all three."""
    codes = {
        name: kvgen("verify", INT8, "--target", name, "--op", "copy")
        for name in ("sm_80", "sm_120", "gfx942")
    }
    refused = [result for result in codes.values() if result.exit_code == 2]
    assert refused and all("error: target" in result.stderr for result in refused)
