"""The tuner: a candidate that fails costs itself only, nothing wrong wins, what is known is not redone."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgen import paths
from kvgen.backends.cpu import batch, machine
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.backends.cpu.job import Job
from kvgen.backends.triton.backend import TritonBackend
from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError
from kvgen.ir import Schedule
from kvgen.ir.plan import OPS, KernelPlan
from kvgen.paths import CacheWarning
from kvgen.resolve import resolve_target
from kvgen.tune import limits
from kvgen.tune.journal import Journal
from kvgen.tune.judge_cpu import CpuJudge
from kvgen.tune.outcome import Outcome, Step
from kvgen.tune.race import Duel
from kvgen.tune.remote import Contender, Remote
from kvgen.tune.space import load_space, space_of
from kvgen.tune.tuner import tune
from tests.support.faults import Faulty, small

pytestmark = pytest.mark.usefixtures("hurry")

Only = Callable[..., None]


def faulty_edit(plan: KernelPlan, text: str) -> str:
    """One fault for each tile size; the default's (32) is sound."""
    tile = plan.schedule["tile"]
    begin = "int run(const Args& a) {"
    assert begin in text
    if tile == 64:
        return text.replace("(float)a.score_scale", "(float)a.score_scale * 1.01f")
    if tile == 128:
        return text.replace(begin, begin + " *(volatile int*)nullptr = 1;")
    if tile == 256:
        return text.replace(begin, begin + " for (volatile int i = 1; i;) {}")
    return "#error broken\n" if plan.schedule["row_block"] == 1 else text


def test_each_failure_is_recorded_and_costs_itself_only(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHECK", (2.0, 4.0, 60.0))
    only({"tile": 16}, {"tile": 64}, {"tile": 128}, {"tile": 256}, {"row_block": 1}, {"heads": 1})
    steps: list[Step] = []
    report = tune(
        small(), ops=["decode"], cache_dir=tuning, backend=Faulty(faulty_edit), progress=steps.append
    )
    (decode,) = report.ops
    assert [trial.outcome for trial in decode.trials] == [
        Outcome.OK,
        Outcome.DUPLICATE,
        Outcome.WRONG,
        Outcome.CRASH,
        Outcome.TIMEOUT,
        Outcome.COMPILE_ERROR,
        Outcome.OK,
    ]
    assert report.outcomes == {
        "compile_error": 1, "crash": 1, "duplicate": 1, "ok": 2, "timeout": 1, "wrong": 1,
    }  # fmt: skip
    assert "SIGSEGV" in decode.trials[3].message
    assert "broken" in decode.trials[5].message
    assert decode.winner in (decode.trials[0].schedule, decode.trials[6].schedule)
    assert decode.how == "measured"
    assert {step.stage for step in steps} == {"prove", "race", "done"} | (
        {"final"} & {step.stage for step in steps}
    )
    assert all(step.done <= step.total for step in steps)
    # Everything is on disk, the failures too.
    (log,) = tuning.rglob("*.trials.jsonl")
    ends = [
        line["outcome"] for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "trial"
    ]
    assert ends == [trial.outcome.value for trial in decode.trials]
    # The one that hangs was given as long as the quickest check before it allows.
    checks = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "check"]
    hung = next(i for i, line in enumerate(checks) if line["outcome"] == "timeout")
    quickest = min(line["seconds"] for line in checks[:hung] if line["outcome"] == "ok")
    assert checks[hung]["limit_s"] == pytest.approx(max(2.0, 4.0 * quickest))


def fixed_races(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, Schedule], float]) -> None:
    """Let races find these seconds, by bucket and schedule."""

    def race(
        self: Remote, op: str, sizes: list[int], contenders: list[Contender], **given: float
    ) -> list[float]:
        return [seconds("x".join(map(str, sizes)), contender.schedule) for contender in contenders]

    monkeypatch.setattr(Remote, "race", race)


def fixed_duels(monkeypatch: pytest.MonkeyPatch, ratios: dict[str, float]) -> None:
    """Let races rate ``heads`` = 1 best, and paired runs give these ratios by bucket."""
    fixed_races(monkeypatch, lambda bucket, schedule: 0.5 if schedule["heads"] == 1 else 1.0)

    def duel(self: Remote, op: str, sizes: list[int], pair: object, **given: float) -> dict[str, object]:
        ratio = ratios["x".join(map(str, sizes))]
        wins = 1.0 if ratio < 0.99 else 0.0 if ratio > 1.01 else 0.5
        return vars(Duel(ratio, wins, 1.0, ratio, True))

    monkeypatch.setattr(Remote, "duel", duel)


@pytest.mark.parametrize(
    ("ratios", "wins"),
    [
        ({"1x40": 1.0, "2x80": 1.0}, False),  # ties go to the default
        ({"1x40": 1.2, "2x80": 0.5}, False),  # never slower than the default, in no bucket
        ({"1x40": 1.0, "2x80": 0.5}, True),
    ],
    ids=["tie", "slower-somewhere", "faster"],
)
def test_a_winner_beats_the_default_and_is_slower_nowhere(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch, ratios: dict[str, float], wins: bool
) -> None:
    fixed_duels(monkeypatch, ratios)
    only({"heads": 1})
    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    assert (decode.winner != decode.default) == wins
    assert decode.speedup == (1.0 if not wins else pytest.approx(2**0.5))


@pytest.mark.parametrize("better", [0.497, 0.45])
def test_ties_go_to_the_canonical_order(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch, better: float
) -> None:
    """heads = 1 comes before prefetch = 0, which is a little better in one case and much in the other."""
    only({"heads": 1}, {"prefetch": 0})
    fixed_races(
        monkeypatch, lambda bucket, schedule: 1.0 if schedule["heads"] * schedule["prefetch"] == 2 else 0.5
    )

    def duel(
        self: Remote, op: str, sizes: list[int], pair: list[Contender], **given: float
    ) -> dict[str, object]:
        ratio = 0.5 if pair[1].schedule["heads"] == 1 else better
        return vars(Duel(ratio, 1.0, 1.0, ratio, True))

    monkeypatch.setattr(Remote, "duel", duel)
    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    rivals = [decode.default.replace(heads=1), decode.default.replace(prefetch=0)]
    tied = min(rivals, key=load_space("cpp/decode").order)
    assert decode.winner == (tied if better > 0.49 else rivals[1])


def test_numerics_knobs_are_equal_in_all_buckets(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only({"heads": 1}, {"heads": 1, "prefetch": 0}, {"split_tokens": 256})
    fixed_duels(monkeypatch, {"1x40": 0.9, "2x80": 0.9})
    # The last one is the fastest everywhere but for the first bucket, where the third is.
    third = {"1x40": 0.1, "2x80": 0.9}
    fixed_races(
        monkeypatch,
        lambda bucket, schedule: (
            (0.6 if bucket == "1x40" else 0.01)
            if schedule["split_tokens"] == 256
            else 1.0
            if schedule["heads"] == 2
            else 0.85
            if schedule["prefetch"]
            else third[bucket]
        ),
    )
    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    assert decode.winner["split_tokens"] == 256
    assert {b.schedule["split_tokens"] for b in decode.buckets} == {256}


def test_a_second_run_only_finds(tuning: Path, only: Only) -> None:
    only()
    first = tune(small(), cache_dir=tuning, backend=CpuBackend("-O1"))
    assert [op.cached for op in first.ops] == [False] * 6
    backend = Faulty(lambda plan, text: text)
    second = tune(small(), cache_dir=tuning, backend=backend)
    assert [op.cached for op in second.ops] == [True] * 6
    assert not backend.compiled
    assert [op.winner for op in second.ops] == [op.winner for op in first.ops]
    assert json.loads(json.dumps(second.to_dict()))["ops"][1]["op"] == "decode"


def test_pins_hold_and_have_their_own_file(tuning: Path, only: Only) -> None:
    only()
    pins = {"decode": {"split_tokens": 1024}}
    (decode,) = tune(small(), ops=["decode"], pins=pins, cache_dir=tuning, backend=CpuBackend("-O1")).ops
    assert decode.winner["split_tokens"] == 1024
    (plain,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    assert not plain.cached


def test_nothing_right_is_an_error_that_says_why(tuning: Path, only: Only) -> None:
    only()
    backend = Faulty(lambda plan, text: text.replace("(float)a.score_scale", "2 * (float)a.score_scale"))
    with pytest.raises(ToolchainError, match=r"none of 1 schedules.*ended as wrong"):
        tune(small(), ops=["decode"], cache_dir=tuning, backend=backend)


def test_a_wrong_default_does_not_stop_the_tuner(tuning: Path, only: Only) -> None:
    only({"tile": 64})
    edit = lambda plan, text: (  # noqa: E731
        text.replace("(float)a.score_scale", "2 * (float)a.score_scale")
        if plan.schedule["tile"] != 64
        else text
    )
    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=Faulty(edit)).ops
    assert decode.winner["tile"] == 64
    assert decode.default_s is None
    assert decode.speedup is None


@pytest.mark.parametrize("name", ["does nothing", "drops the last keys", "wrong for several queries"])
def test_a_template_wrong_for_one_tile_cannot_win(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It would win: it is much faster than what is right."""
    only({"tile": 64})
    fixed_duels(monkeypatch, {"1x40": 0.5, "2x80": 0.5})
    fixed_races(monkeypatch, lambda bucket, schedule: 0.5 if schedule["tile"] == 64 else 1.0)
    begin = "int run(const Args& a) {"
    old, new = {
        "does nothing": (begin, begin + " if (a.out) return 0;"),
        "drops the last keys": ("r.hi = kv_len", "r.hi = kv_len - (kv_len > 150)"),
        "wrong for several queries": ("(float)a.score_scale", "2 * (float)a.score_scale"),
    }[name]

    def edit(plan: KernelPlan, text: str) -> str:
        assert old in text or plan.variant == "multi"  # that one cuts its keys elsewhere
        # Right as it is timed: the variant that was not needed for the race is the wrong one.
        spared = name == "wrong for several queries" and plan.variant == "single"
        return text.replace(old, new) if plan.schedule["tile"] == 64 and not spared else text

    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=Faulty(edit)).ops
    assert decode.winner == decode.default
    wrong = decode.trials[1]
    assert (wrong.outcome, wrong.schedule["tile"]) == (Outcome.WRONG, 64), wrong
    assert all(bucket.schedule == decode.default for bucket in decode.buckets)


def test_a_default_that_is_wrong_in_another_variant_does_not_stay(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the fastest, and right in the variant that is timed."""
    only({"tile": 64})
    fixed_races(monkeypatch, lambda bucket, schedule: 2.0 if schedule["tile"] == 64 else 1.0)
    right = [64]

    def edit(plan: KernelPlan, text: str) -> str:
        sound = plan.variant == "single" or plan.schedule["tile"] in right
        return text if sound else text.replace("(float)a.score_scale", "2 * (float)a.score_scale")

    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=Faulty(edit)).ops
    assert [trial.outcome for trial in decode.trials] == [Outcome.WRONG, Outcome.OK]
    assert decode.winner["tile"] == 64 and decode.default_s is None
    for file in tuning.rglob("*.json"):
        file.unlink()
    right.clear()
    with pytest.raises(ToolchainError, match="no schedule is right in every variant"):
        tune(small(), ops=["decode"], cache_dir=tuning, backend=Faulty(edit))


def test_equal_machine_code_is_run_once(only: Only, tuning: Path) -> None:
    only({"heads": 1}, {"prefetch": 0})
    first: list[tuple[str, str]] = []

    def edit(plan: KernelPlan, text: str) -> str:
        first.append((plan.entry, text))
        entry, default = first[0]
        if plan.schedule["heads"] != 1:
            return text
        return default.replace(entry, plan.entry) + "\nconstexpr int unused_heads = 1;\n"

    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=Faulty(edit)).ops
    assert [trial.outcome for trial in decode.trials] == [Outcome.OK, Outcome.DUPLICATE, Outcome.OK]
    assert "same machine code" in decode.trials[1].message
    (log,) = tuning.rglob("*.trials.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(line["kind"] == "check" and line["key"]["variant"] == "single" for line in lines) == 2


@pytest.mark.parametrize("end", ["for (volatile int i = 1; i;) {}", "*(volatile int*)nullptr = 1;"])
def test_a_candidate_may_fail_as_late_as_in_the_race(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(limits, "RACE", (1.0, 6.0, 60.0))
    only({"heads": 1}, {"prefetch": 0})
    begin = "int run(const Args& a) {"

    def edit(plan: KernelPlan, text: str) -> str:
        assert begin in text
        fault = f" if (a.kv_lens[0] == 80) {{ {end} }}" if plan.schedule["heads"] == 1 else ""
        return text.replace(begin, begin + fault)

    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=Faulty(edit)).ops
    outcome = Outcome.TIMEOUT if "for" in end else Outcome.CRASH
    assert [trial.outcome for trial in decode.trials] == [Outcome.OK, outcome, Outcome.OK]
    assert "on 2x80" in decode.trials[1].message
    assert decode.winner["heads"] == 2


def test_the_best_are_compiled_first_within_what_the_best_so_far_took(
    only: Only, tuning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches; time is up in the second: the third is not even compiled, and that is recorded."""
    monkeypatch.setattr(machine, "num_threads", lambda requested=None: 2)
    monkeypatch.setattr(limits, "COMPILE", (0.01, 8.0, 99.0))
    changes = [{"heads": 1}, {"prefetch": 0}, {"split_tokens": 256}, {"split_tokens": 1024}, {"row_block": 2}]
    only(*changes, *({"heads": 1, **change} for change in changes[1:]))
    batches: list[list[Job]] = []
    compile_many = batch.compile_many

    def watched(jobs: list[Job], **given: object) -> list[batch.Outcome]:
        batches.append(jobs)
        if len(batches) == 2:
            monkeypatch.setattr(CpuJudge, "late", True)
        return compile_many(jobs, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(batch, "compile_many", watched)
    # What wins is of no interest here, and would be compiled in its other variants.
    monkeypatch.setattr(CpuJudge, "winner", lambda self, pool, base, *given: base)
    monkeypatch.setattr(CpuJudge, "better", lambda *given: False)
    (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    assert [len(jobs) for jobs in batches] == [4, 4]
    assert {job.timeout_s for job in batches[0]} == {99.0}, "nothing is known yet"
    (limit,) = {job.timeout_s for job in batches[1]}
    assert limit == pytest.approx(8.0 * min(trial.seconds for trial in decode.trials[:4]), abs=0.01)
    ends = [trial.outcome for trial in decode.trials]
    assert ends == [Outcome.OK] * 4 + [Outcome.SKIPPED] * 6
    (log,) = tuning.rglob("*.trials.jsonl")
    logged = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "trial"]
    assert [line["outcome"] for line in logged] == [end.value for end in ends]


def test_winners_of_another_device_are_set_aside_and_seed(tuning: Path, only: Only) -> None:
    only()
    tune(small(), ops=["decode"], cache_dir=tuning, backend=CpuBackend("-O1"))
    (path,) = tuning.rglob("decode__*.json")
    (log,) = tuning.rglob("decode__*.jsonl")
    stored = json.loads(path.read_text())
    schedule = {**stored["schedule"], "heads": 1}
    path.write_text(json.dumps(stored | {"device": "a toaster", "schedule": schedule, "buckets": {}}))
    log.write_text(log.read_text().replace(stored["device"], "a toaster"))
    with pytest.warns(CacheWarning) as caught:
        (decode,) = tune(small(), ops=["decode"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    said = sorted(str(warning.message) for warning in caught)
    assert len(said) == 2, "one for each file"
    assert str(path) in said[0] and "a toaster" in said[0]
    assert str(log) in said[1] and "a toaster" in said[1]
    assert len(list(tuning.rglob("*.bad-0"))) == 2
    assert not decode.cached and not decode.resumed
    assert [trial.schedule["heads"] for trial in decode.trials] == [2, 1], "it was tried again here"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_fails_late_costs_a_warning(
    tuning: Path, only: Only, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The probe went well, and then the disk was full or mounted read-only."""
    only()
    atomic = paths.write_atomic

    def fail(path: Path, data: bytes | str) -> None:
        if tuning in path.parents:
            raise OSError(code, os.strerror(code), str(path))
        atomic(path, data)

    append = Journal._append

    def torn(self: Journal, line: bytes) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", lambda *given: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
            append(self, line)

    monkeypatch.setattr(paths, "write_atomic", fail)
    monkeypatch.setattr(Journal, "_append", torn)
    with pytest.warns(CacheWarning, match=re.escape(os.strerror(code))) as caught:
        (merge,) = tune(small(), ops=["merge"], cache_dir=tuning, backend=CpuBackend("-O1")).ops
    assert merge.winner_s and merge.winner_s > 0
    assert len(caught) == 2, "one for the log, one for the winner"
    assert not [path for path in tuning.rglob("*") if path.is_file()]


def test_the_tuner_looks_where_the_backends_do() -> None:
    """A hit is answered without a backend, so the folder of its templates stands in two places."""
    for name, backend in (("cpu", CpuBackend()), ("sm_90", TritonBackend())):
        for op in OPS:
            assert space_of(op, resolve_target(name)).template == backend.space(op)


def test_bad_requests_are_refused(tuning: Path) -> None:
    with pytest.raises(UnsupportedError, match="interpreter"):
        tune(small(), "interpret", cache_dir=tuning)
    with pytest.raises(ArgumentError, match="effort"):
        tune(small(), effort="heroic", cache_dir=tuning)
    with pytest.raises(ArgumentError, match="no op"):
        tune(small(), ops=["fly"], cache_dir=tuning)
    with pytest.raises(ArgumentError, match="no such knob"):
        tune(small(), ops=["decode"], pins={"decode": {"wings": 2}}, cache_dir=tuning)


def test_gpu_winners_are_predicted(tuning: Path, only: Only) -> None:
    pytest.importorskip("triton")
    only({"num_warps": 4})
    (append,) = tune(small(), "sm_90", ops=["append"], cache_dir=tuning).ops
    assert append.how == "predicted"
    assert len(append.trials) == 2
    (file,) = tuning.rglob("append__*.json")
    assert json.loads(file.read_text())["how"] == "predicted"
    assert json.loads(file.read_text())["device"] == ""
