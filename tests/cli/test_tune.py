"""``kvgen tune``: the report as text and JSON, from a tuner that is replaced, and once for real."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgen.commands.tune_report import changes, duration
from kvgen.errors import UnsupportedError
from kvgen.ir import Schedule
from kvgen.ir.plan import OPS
from kvgen.passes.validate import load_spec
from kvgen.resolve import resolve_target
from kvgen.tune import store, tuner
from kvgen.tune.device import device_name
from kvgen.tune.key import key_of
from kvgen.tune.outcome import BucketReport, OpReport, Outcome, Step, Trial, TuneReport
from kvgen.tune.space import space_of, spec_facts
from kvgen.units import scaled

DONE = "decode: done: best 87.3 us, default 200 us"
INT8 = "examples/llama3-8b-int8.toml"


def report(how: str = "measured") -> TuneReport:
    default, winner = Schedule.of({"tile": 32, "heads": 8}), Schedule.of({"tile": 64, "heads": 8})
    buckets = (
        BucketReport("1x512", default, 100e-6, 50e-6),
        BucketReport("8x4096", winner, 1234567e-6, None),
    )
    trials = (
        Trial(winner, Outcome.WRONG, "decode of 3 keys: error 0.5\nand more"),
        Trial(default, Outcome.OK),
    )
    decode = OpReport(
        "decode", how, False, default, winner, 200e-6, 100e-6,
        {"ok": 7, "wrong": 2, "duplicate": 3, "skipped": 1}, 12.0, buckets, trials,
        {"build": 4, "time": 9}, ("a note",),
    )  # fmt: skip
    kept = OpReport("copy", how, True, default, default, 9.87e-6, 9.87e-6, {}, 0.0, ())
    return TuneReport("llama3-8b-int8", "24a5bc15" + 56 * "0", "cpu-avx2", "quick", 12.3, (decode, kept))


HEAVY = ("jinja2", "numpy", "rich", "sympy", "torch", "triton")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asked of the tuner, which answers at once."""
    seen: dict[str, Any] = {}

    def tune(spec: Any, target: str, *, progress: Any, **given: Any) -> TuneReport:
        seen.update(given, spec=spec, target=target)
        progress(Step("decode", "prove", 0, 12))
        progress(Step("decode", "race", 3, 12, 100e-6, 200e-6))
        progress(Step("decode", "prove", 0, 4))
        progress(Step("decode", "done", 1, 6, 87.3e-6, 200e-6))
        return report("predicted" if target == "sm_90" else "measured")

    monkeypatch.setattr(tuner, "tune", tune)
    return seen


def test_one_row_for_each_op(kvgen: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    result = kvgen("tune", INT8, "--cache-dir", tmp_path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    (decode,) = (line for line in lines if line.startswith("decode") and "->" in line)
    assert decode.split() == [
        "decode", "200", "100", "2.00x", "12.0",
        "13:", "7", "ok,", "1", "skipped,", "2", "wrong,", "3", "merged", "measured", "tile", "32->64",
    ]  # fmt: skip
    (copy,) = (line for line in lines if line.startswith("copy"))
    assert copy.split() == ["copy", "9.87", "9.87", "1.00x", "-", "-", "kept", "nothing"]
    assert "decode  8x4096     1,234,567         -         -" in result.stdout
    assert "decode, heads=8 tile=64: wrong: decode of 3 keys: error 0.5\n" in result.stdout, "one line each"
    assert "Merged: 3 with" in result.stdout and "Skipped: 1 for lack of time" in result.stdout
    assert (
        "Resumed: decode: 4 builds, 9 timings were in its log" in result.stdout
        and "a note\n" in result.stdout
    )
    assert f"Winners are kept in {tmp_path}/cpu-avx2" in result.stdout
    assert result.stderr.splitlines() == ["decode: compile and check (12)", "decode: race (12)", DONE]


@pytest.mark.parametrize("option", ["KVGEN_CACHE_DIR", "--cache-dir"])
@pytest.mark.filterwarnings("ignore::kvgen.paths.CacheWarning")
def test_winners_that_go_with_the_process_are_not_called_kept(
    kvgen: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    words = ["tune", INT8]
    if option == "--cache-dir":
        words += [option, str(tmp_path / "file" / "cache")]
    else:
        monkeypatch.setenv(option, str(tmp_path / "file" / "cache"))
    said = kvgen(*words).stdout
    assert "Winners are kept" not in said
    assert f"Winners were not kept: there is no folder for them; set {option} to a writable one" in said
    assert json.loads(kvgen(*words, "--json").stdout)["stored"] is None


def test_predictions_are_not_times(kvgen: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    text = kvgen("tune", INT8, "--target", "sm_90", "--cache-dir", tmp_path).stdout
    assert "default ps" in text and "Predicted: ps per KV token" in text and " us" not in text


def test_what_the_tuner_is_asked(
    kvgen: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kvgen(
        "tune", INT8, "--op", "decode,copy", "--pin", "decode.tile=64", "--cache-dir", tmp_path, "-t", "sm_90"
    )
    assert asked["ops"] == ("decode", "copy") and asked["pins"] == {"decode": {"tile": 64}}
    assert asked["effort"] == "quick" and asked["cache_dir"] == tmp_path
    assert asked["target"] == "sm_90" and asked["spec"].hash8 == "24a5bc15"
    monkeypatch.setenv("KVGEN_AUTOTUNE_EFFORT", "full")
    kvgen("tune", INT8)
    assert asked["effort"] == "full" and asked["cache_dir"] is None


def test_json(kvgen_json: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    data = kvgen_json("tune", INT8, "--cache-dir", tmp_path)
    assert data == json.loads(json.dumps(report().to_dict())) | {"stored": str(tmp_path / "cpu-avx2")}


def test_refusals(
    kvgen: Any, kvgen_json: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kvgen("tune", INT8, "--effort", "some").exit_code == 2
    assert kvgen("tune", INT8, "--pin", "tile=3").exit_code == 2
    assert asked == {}

    def refuse(*args: Any, **given: Any) -> TuneReport:
        raise UnsupportedError("not on this target")

    monkeypatch.setattr(tuner, "tune", refuse)
    assert kvgen_json("tune", INT8, exit_code=2)["error"]["type"] == "UnsupportedError"


def test_words() -> None:
    schedule = Schedule.of({"tile": 32, "ids": "ahead"})
    assert changes(schedule, schedule) == "nothing"
    assert changes(schedule, schedule.replace(ids="inline", tile=64)) == "ids ahead->inline, tile 32->64"
    found = [scaled(x, 1e-6) for x in (None, 1.2345e-6, 99.94e-6, 1.2345e-3)]
    assert found == ["-", "1.23", "99.9", "1,234"]
    assert [duration(x) for x in (2.0, 1.5e-3, 87.3e-6, 2.45e-13)] == ["2 s", "1.5 ms", "87.3 us", "0.245 ps"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="kernels run through torch")
def test_for_real(kvgen_json: Any, tmp_path: Path) -> None:
    """The op with the least to try, on this CPU: proven, timed, and found again."""
    data = kvgen_json("tune", INT8, "--op", "merge", "--cache-dir", tmp_path)
    (merge,) = data["ops"]
    assert merge["how"] == "measured" and merge["winner_s"] > 0 and not merge["cached"]
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    assert kvgen_json("tune", INT8, "--op", "merge", "--cache-dir", tmp_path)["ops"][0]["cached"]


def test_why(
    kvgen: Any, kvgen_json: Any, asked: dict[str, Any], tmp_path: Path, nothing_shipped: None
) -> None:
    result = kvgen("tune", INT8, "--why", "--op", "copy", "--cache-dir", tmp_path)
    assert result.exit_code == 0 and asked == {}, "nothing is tuned"
    assert "copy  miss   no record of this op is stored" in result.stdout
    spec, target = load_spec(INT8), resolve_target("cpu")
    space = space_of("copy", target)
    key = key_of("copy", spec, target, {}, space)
    default = space.default(target, spec_facts(spec, target))
    store.write(
        store.Winners(default, {}, "measured", "quick", device_name(target), "2026-01-02"),
        key,
        cache_dir=tmp_path,
    )
    assert "copy  hit " in kvgen("tune", INT8, "--why", "--op", "copy", "--cache-dir", tmp_path).stdout
    data = kvgen_json("tune", INT8, "--why", "--op", "copy", "--effort", "full", "--cache-dir", tmp_path)
    (copy,) = data["ops"]
    assert not copy["hit"] and copy["nearest"] == copy["file"]
    assert copy["differs"] == [{"field": "effort", "stored": "quick", "wanted": "full"}]


def test_a_hit_imports_nothing_heavy(repo_root: Path, tmp_path: Path) -> None:
    """All six ops from the cache: the process stays far below a second because of what it leaves alone."""
    spec, target = load_spec(repo_root / INT8), resolve_target("cpu")
    for op in OPS:
        space = space_of(op, target)
        default = space.default(target, spec_facts(spec, target))
        winners = store.Winners(default, {}, "measured", "quick", device_name(target), "2026-01-02")
        store.write(winners, key_of(op, spec, target, {}, space), cache_dir=tmp_path)
    for extra in (["--why"], []):
        words = ["tune", str(repo_root / INT8), "--json", "--cache-dir", str(tmp_path), *extra]
        code = (
            "import sys; from kvgen.cli import main; sys.argv = ['kvgen', *sys.argv[1:]]\n"
            "try: main()\n"
            "except SystemExit: pass\n"
            f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=repo_root, capture_output=True, text=True, check=True
        )
        ops = json.loads(done.stdout)["ops"]
        assert [op.get("cached", op.get("hit")) for op in ops] == [True] * 6
        assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="kernels run through torch")
def test_a_cache_that_cannot_be_written_costs_a_warning(kvgen_process: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder should be")
    done = kvgen_process("tune", INT8, "--op", "merge", "--json", KVGEN_CACHE_DIR=str(blocked))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ops"][0]["winner_s"] > 0
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1 and str(blocked) in warned[0]
    assert blocked.read_text() == "a file where the folder should be"
