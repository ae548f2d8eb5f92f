"""kvgen bench --overhead: every figure is there, and the C loop runs the kernel that it says it times."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvgen import overhead
from kvgen.cli import app
from tests.support.specs import make_spec


def test_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CALLS", 5)
    spec = make_spec("int8-token", "int8-head", page_size=4, kv_heads=2, group=2, head_dim=16)
    found = overhead.measure(spec, samples=2)
    calls = ("python, checked", "python, unchecked", "c")
    assert [(row.op, row.call) for row in found] == [(op, c) for op in ("decode", "append") for c in calls]
    assert all(0 < row.least_us <= row.median_us for row in found)


def test_the_c_loop_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(overhead, "CALLS", 3)
    spec = make_spec("f32", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)
    library = overhead.build(spec, tune="off")
    scene = overhead._Scene(library, 1)
    scene.decode(library)
    want = scene._made["out"].clone()
    scene._made["out"].fill_(torch.nan)
    assert overhead._c(library, scene, "decode")() > 0
    assert torch.equal(scene._made["out"], want)
    scene._read[3].fill_(100)  # more keys than the table holds
    with pytest.raises(Exception, match="the kernel refused its arguments"):
        overhead._c(library, scene, "decode")()


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "SAMPLES", 1)
    done = CliRunner().invoke(app, ["bench", "--overhead", "examples/llama3-8b-bf16.toml", "--json"])
    assert done.exit_code == 0, done.output
    assert {row["op"] for row in json.loads(done.output)} == {"decode", "append"}
    tiny = CliRunner().invoke(app, ["bench", "--overhead"])
    assert tiny.exit_code == 0 and "tiny" in tiny.output and "python, checked" in tiny.output
