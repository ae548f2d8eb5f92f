"""``kvgen.build(tune="full")`` says how far it is: it was silent for minutes."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.builder import assemble
from kvgen.tune import tuner
from kvgen.tune.outcome import Step, TuneReport
from kvgen.tune.telling import lines
from tests.support.faults import small


def test_each_stage_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell = lines("small", "cpu-avx2")
    for step in (
        Step("decode", "prove", 0, 12),
        Step("decode", "prove", 1, 12),
        Step("decode", "race", 0, 1),
        Step("decode", "prove", 0, 4),
        Step("decode", "done", 2, 6, 87.3e-6, 200e-6),
        Step("copy", "done", 5, 6),
    ):
        tell(step)
    found = capsys.readouterr()
    assert found.out == "" and found.err.splitlines() == [
        "tuning small on cpu-avx2: decode: compile and check (12)",
        "tuning small on cpu-avx2: decode: race",
        "tuning small on cpu-avx2: decode: done: 87.3 us, default 200 us",
        "tuning small on cpu-avx2: copy: done",
    ]


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_a_build_that_tunes_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    def tune_ops(spec: Any, record: Any, target: Any, *given: Any, progress: Any, **more: Any) -> TuneReport:
        assert more["effort"] == mode
        progress(Step("decode", "prove", 0, 12))
        return TuneReport(spec.name, spec.hash, target.name, mode, 0.0, ())

    monkeypatch.setattr(tuner, "tune_ops", tune_ops)
    assemble(small(), "cpu-portable", tune=mode)
    said = capsys.readouterr().err
    assert said == "tuning small on cpu-portable: decode: compile and check (12)\n"
