"""Names that a user registered mean the same in the process that checks and times candidates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvgen import definitions
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.cli import app
from kvgen.errors import ToolchainError
from kvgen.ir import Param, RopeSpec, Spec
from kvgen.ir.codec import CODECS, Codec
from kvgen.ir.codec import registered as codecs
from kvgen.passes.fields import SWITCH, Field
from kvgen.passes.validate import load_spec
from kvgen.resolve import resolve_target
from kvgen.tune import carried as carrying
from kvgen.tune import remote
from kvgen.tune.outcome import Outcome
from kvgen.tune.remote import Remote
from kvgen.tune.tuner import tune
from kvgen.variants import Definition, Formula, Position, registered, registry
from tests.support.faults import small

pytestmark = pytest.mark.usefixtures("hurry")

FIFTHS = Codec(
    "fifths", "table", bits=3, qmax=1.0, levels=(-1.0, -0.6, -0.2, 0.0, 0.2, 0.6, 0.8, 1.0),
)  # fmt: skip


def drawn(param: Param, draw: Any) -> Any:
    """Keys that a request keeps: needs this process's own code."""
    SEEN.append((param.name, draw.batch))
    return draw.rng.integers(0, 9, draw.shape(param))


SEEN: list[tuple[str, int]] = []
STRIPES = Definition(
    name="stripes",
    kind="mask",
    field=Field(SWITCH, "true or false", False),
    doc="",
    source="this test",
    formula=lambda value, q_heads: Formula(
        "kv_pos <= q_pos and ((q_pos - kv_pos) % 3 == 0 or kv_pos < kept[batch])",
        params=(Param("kept", ("batch",), "i32"),),
    ),
    example={"causal": False, "stripes": True},
    sample=drawn,
)
SLOW = Position(
    "slow", {}, "", "this test", lambda rope: ([0.01 * (i + 1) for i in range(rope.dim // 2)], 1.5)
)


def own() -> Spec:
    """``small`` with a codec, a mask and a position scheme of this file's own."""
    raw = small(causal=False, stripes=True, rope={"kind": "slow", "stored": "pre"}).to_dict()
    raw["cache"]["v"] = {"format": "fifths", "group": {"tok": 1, "head": 1}}
    return load_spec(raw)


def test_a_spec_of_names_of_ones_own_is_tuned(only: Callable[..., None], tuning: Path) -> None:
    only({"heads": 1})
    SEEN.clear()
    with codecs(FIFTHS), registered(STRIPES, SLOW):
        report = tune(own(), ops=["decode", "copy"], cache_dir=tuning, backend=CpuBackend("-O1"))
    decode, copy = report.ops
    assert [trial.outcome for trial in decode.trials] == [Outcome.OK, Outcome.OK]
    assert {trial.outcome for trial in copy.trials} <= {Outcome.OK, Outcome.DUPLICATE}
    assert {name for name, _ in SEEN} == {"kept"}, "its sample was asked for"


FILE = """
from kvgen.ir import Param
from kvgen.ir.codec import Codec
from kvgen.ir.codec import register as codec
from kvgen.passes.fields import SWITCH, Field
from kvgen.variants import Definition, Formula, register

codec(Codec("fifths", "table", bits=3, qmax=1.0, levels=(-1.0, -0.6, -0.2, 0.0, 0.2, 0.6, 0.8, 1.0)))
register(
    Definition(
        "stripes", "mask", Field(SWITCH, "true or false", False), "", "", lambda value, q_heads: Formula(
            "(q_pos - kv_pos) % 3 == 0"), {"stripes": True},
    )
)
"""
SPEC = """
[attention]
q_heads = 4
kv_heads = 2
head_dim = 32
q_dtype = "f32"
stripes = true
[cache]
page_size = 37
layout = "page kv head tok d"
[cache.k]
format = "f32"
[cache.v]
format = "fifths"
group = { tok = 1, head = 1 }
"""


def test_the_command_tunes_what_a_file_registers(
    only: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only()
    monkeypatch.setattr(definitions, "_loaded", {})
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "own.toml").write_text(SPEC)
    words = ["tune", tmp_path / "own.toml", "--op", "copy", "--import", tmp_path / "own.py"]
    try:
        result = CliRunner().invoke(app, [*map(str, words), "--cache-dir", str(tmp_path / "tune")])
    finally:
        CODECS.pop("fifths", None)
        registry._DEFINITIONS.pop("stripes", None)
        registry.OWN.pop("stripes", None)
    assert result.exit_code == 0, result.output
    assert re.search(r"^copy .* 1 ok +nothing", result.stdout, re.MULTILINE), result.stdout


def test_what_is_carried_means_the_same() -> None:
    with codecs(FIFTHS), registered(STRIPES, SLOW):
        spec = own()
        sent = json.loads(json.dumps(carrying.carried(spec)))
        question = {
            "sample": "stripes", "param": "kept", "heads": 4, "kv": 9, "kv_lens": [7, 8],
            "q_starts": [0, 1, 2], "seed": 5,
        }  # fmt: skip
        answers = [carrying.answer(spec, question) for _ in range(2)]
    assert answers[0] == answers[1]
    assert sent["meanings"] == dict(spec.meanings)
    assert [codec["name"] for codec in sent["codecs"]] == ["fifths"]

    asked: list[dict[str, Any]] = []
    adopted: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrying, "register", adopted.append)
        patch.setattr(carrying.registry, "register", adopted.append)
        carrying.adopt(sent, lambda question: asked.append(question) or answers[0])  # type: ignore[func-returns-value]
    codec, mask, scheme = adopted
    assert replace(codec, built_in=False) == FIFTHS
    assert mask.formula(True, 4) == STRIPES.formula(True, 4)
    rope = RopeSpec(kind="slow", theta=1e4, dim=8, pairing="half", stored="pre")
    with registered(SLOW):
        assert scheme.frequencies(rope)[1] == 1.5
    assert np.array_equal(
        mask.sample(Param("kept", ("batch",), "i32"), _draw()), np.random.default_rng(5).integers(0, 9, 2)
    )
    assert asked[0]["kv_lens"] == [7, 8]


def _draw() -> Any:
    from kvgen.variants.draw import Draw

    return Draw(4, np.array([7, 8]), np.array([0, 1, 2]), 9, np.random.default_rng(0))


def test_kvgens_own_names_are_not_carried() -> None:
    sent = carrying.carried(small(window=5, soft_cap=3.0))
    assert sent == {"meanings": {}, "codecs": [], "definitions": [], "rope": None}


@pytest.mark.parametrize("change", [{"codecs": [{"name": "x"}]}, {"codecs": [], "rope": None}])
def test_a_process_that_cannot_take_the_spec_is_an_error(
    only: Callable[..., None], tuning: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """It answered with an error that nobody read: each candidate "timed out", and that was believed later."""
    only()
    monkeypatch.setattr(remote, "carried", lambda spec: change)
    with pytest.raises(ToolchainError, match="tuning process could not start"):
        tune(small(), ops=["copy"], cache_dir=tuning, backend=CpuBackend("-O1"))
    (log,) = tuning.rglob("*.trials.jsonl")
    kinds = {line["kind"] for line in map(json.loads, log.read_text().splitlines())}
    assert "check" not in kinds and "time" not in kinds, "no verdict of a process that judged nothing"


def test_an_error_reply_that_is_no_candidates_fault_stops_the_tuner(
    only: Callable[..., None], tuning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only()
    with Remote(small(), resolve_target("cpu")) as process, pytest.raises(ToolchainError, match="SpecError"):
        process._refuse({"error": "SpecError", "message": "no such mask", "outcome": None})


def test_a_verdict_of_version_2_is_not_believed(only: Callable[..., None], tuning: Path) -> None:
    """A spec with a name of its own may have left "timed out" for a copy that other specs share."""
    only()
    tune(small(), ops=["copy"], cache_dir=tuning, backend=CpuBackend("-O1"))
    (log,) = tuning.rglob("*.trials.jsonl")
    lines = []
    for line in map(json.loads, log.read_text().splitlines()):
        if line["kind"] == "check":
            line["key"]["protocol"] = 2
            line |= {"outcome": "timeout", "message": "no end after 60.0 s", "limit_s": 60.0}
        lines.append(json.dumps(line) + "\n")
    log.write_text("".join(lines))
    for winners in tuning.rglob("copy__*.json"):
        winners.unlink()
    (copy,) = tune(small(), ops=["copy"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    assert [trial.outcome for trial in copy.trials] == [Outcome.OK]
