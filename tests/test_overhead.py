"""kvgen bench --overhead: every figure is there, and the C loop runs the kernel that it says it times."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvgen import overhead
from kvgen.cli import app
from kvgen.passes.validate import load_spec

SPEC = load_spec(overhead.TINY)


def test_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CALLS", 5)
    found = overhead.measure(SPEC, samples=2)
    calls = ("python, checked", "python, unchecked", "c")
    assert [(row.op, row.call) for row in found] == [(op, c) for op in ("decode", "append") for c in calls]
    assert all(0 < row.least_us <= row.median_us for row in found)


def test_the_c_loop_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(overhead, "CALLS", 3)
    library = overhead.build(SPEC, tune="off")
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
    done = CliRunner().invoke(app, ["bench", "--overhead", "--json"])
    assert done.exit_code == 0, done.output
    assert {(row["spec"], row["op"]) for row in json.loads(done.output)} == {
        ("tiny", "decode"),
        ("tiny", "append"),
    }
    text = CliRunner().invoke(app, ["bench", "--overhead"])
    assert text.exit_code == 0 and "python, checked" in text.output
