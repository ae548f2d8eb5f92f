"""A real run of small specs, end to end; nothing here judges a speed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from kvgen.bench import Report, bench
from kvgen.bench.cases import CASES, free
from kvgen.bench.contender import Scene, Shape
from kvgen.bench.expect import SAMPLED_ROWS, Expected
from kvgen.bench.peak import kind_of, peak
from kvgen.bench.peers.registry import PEERS
from kvgen.bench.report import DISTURBED, FAILED, OK, WRONG
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.runtime.ops import CacheOps
from tests.bench.conftest import CASES as SMALL_CASES
from tests.bench.conftest import F32, INT8, SMALL, TORCH
from tests.support.specs import make_spec

DECODE = free([2], 40, None)
WINDOWED = make_spec(mask=(True, 7), q_dtype="bf16")


def test_everyone_is_right_and_timed(small_report: Report) -> None:
    assert [case.case for case in small_report.cases] == [case.name for case in SMALL_CASES]
    for case in small_report.cases:
        for row in case.rows:
            assert (row.status, row.message) == (OK, ""), f"{case.case}: {row}"
            assert row.error is not None and row.tolerance is not None and row.error <= row.tolerance
            if row.spec:  # quantising is no fault of the kernel's
                assert row.oracle_error is not None and row.oracle_error <= min(row.tolerance, 0.015)
            assert row.seconds is not None and row.seconds.count == len(row.samples) >= 3


def test_peers_take_part_where_they_can_in_the_types_of_the_specs(small_report: Report) -> None:
    by_case = {case.case: [row.contender for row in case.rows] for case in small_report.cases}
    decode = by_case["decode-2x40"]
    assert {"sdpa-folded bf16", "sdpa-folded f32", "sdpa-gqa bf16", "gather+sdpa f32"} <= set(decode)
    assert {"index_copy bf16", "index_copy f32"} <= set(by_case["append-5"])
    assert {"index bf16"} <= set(by_case["copy-48"]) & set(by_case["gather-2x40"])
    assert sum(name.startswith("kvgen ") for name in decode) == 2


def test_figures_agree_with_each_other(small_report: Report) -> None:
    case = small_report.cases[0]
    rows = {row.contender: row for row in case.rows}
    ours = rows[f"kvgen {INT8.name}"]
    assert ours.ratios[INT8.name].median == 1.0
    # 40 keys of 2 requests: K as int8 with a scale, V as bf16, 2 heads of 64.
    assert ours.nbytes == 2 * 40 * 2 * (64 + 4 + 2 * 64)
    assert ours.seconds is not None and ours.gb_per_s == pytest.approx(
        ours.nbytes / ours.seconds.median / 1e9
    )
    assert ours.sets * ours.nbytes >= 1 << 18
    peer = rows["sdpa-folded bf16"]
    turn = next(iter(set(peer.samples) & set(ours.samples)))
    ratio = peer.ratios[INT8.name]
    assert ratio.low <= ratio.median <= ratio.high
    assert peer.samples[turn] > 0 and ours.fraction is not None and ours.fraction.median > 0
    assert [limit.of for limit in case.limits] == [INT8.name, F32.name]
    assert all(limit.bytes_per_s is not None and limit.threads == 1 for limit in case.limits)


def test_a_prefill_is_held_against_arithmetic(small_report: Report) -> None:
    case = next(case for case in small_report.cases if case.case == "prefill-1x20-on-30")
    flop = 2 * 8 * (64 + 64) * sum(range(31, 51))
    for row in case.rows:
        assert row.seconds is not None
        assert row.gflop_per_s == pytest.approx(flop / row.seconds.median / 1e9)
        assert (row.of_peak is not None) == bool(case.peaks)
    assert not small_report.cases[0].peaks and small_report.cases[0].rows[0].gflop_per_s is None
    if kind_of("f32") is not None:
        assert set(case.peaks) == {kind_of("bf16"), "f32"}


def test_the_peak_is_that_of_the_arithmetic_at_hand() -> None:
    kinds = {kind for kind in (kind_of("bf16"), kind_of("f32")) if kind is not None}
    assert all(peak(kind, 1) > 0 for kind in kinds)
    with pytest.raises(UnsupportedError, match="f64 arithmetic"):
        peak("f64", 1)


def test_a_report_survives_json(small_report: Report) -> None:
    assert Report.from_json(json.loads(json.dumps(small_report.to_json()))) == small_report


@pytest.mark.parametrize("data", [{}, [], {"facts": {}}, 3, {"facts": 1, "cases": [], "specs": {}}])
def test_other_json_is_refused(data: Any) -> None:
    with pytest.raises(ArgumentError, match="not a report"):
        Report.from_json(data)


def test_who_is_wrong_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = CacheOps.decode

    def scaled(self: CacheOps, *args: Any, **keywords: Any) -> Any:
        out, lse = decode(self, *args, **keywords)
        return out.mul_(1.1), lse

    monkeypatch.setattr(CacheOps, "decode", scaled)
    (case,) = bench([INT8], DECODE, peers=[PEERS["sdpa-folded"]], threads=1, settings=SMALL, tune="off").cases
    ours, peer = case.rows
    assert (ours.status, ours.seconds, ours.samples) == (WRONG, None, {})
    assert "against" in ours.message and ours.error is not None and ours.error > 0.05
    assert (peer.status, peer.ratios) == (OK, {})


def test_a_peer_that_fails_says_why_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.bench.peers.sdpa import Folded

    def fail(self: Folded, turn: int) -> None:
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setattr(Folded, "call", fail)
    (case,) = bench([INT8], DECODE, peers=[PEERS["sdpa-folded"]], threads=1, settings=SMALL, tune="off").cases
    ours, peer = case.rows
    assert (ours.status, peer.status, peer.message) == (OK, FAILED, "RuntimeError: no such kernel")


def test_who_cannot_take_part_is_named_with_the_reason() -> None:
    (case,) = bench([WINDOWED], DECODE, peers=TORCH, threads=1, settings=SMALL, tune="off").cases
    assert [row.status for row in case.rows] == [OK]
    assert "window" in case.left_out["sdpa-folded bf16"]


def test_a_busy_machine_leaves_no_figure() -> None:
    waits = iter(range(0, 10**18, 10**9))
    busy = dataclasses.replace(SMALL, waited=lambda: next(waits), seconds=0.2)
    (case,) = bench([INT8], DECODE, threads=1, settings=busy, tune="off").cases
    (row,) = case.rows
    assert (row.status, row.seconds, row.gb_per_s) == (DISTURBED, None, None)
    assert row.dropped >= 9 and f"{row.dropped} of {row.dropped} samples dropped" in row.message
    assert case.limits[0].bytes_per_s is None


def test_one_long_request_is_timed_beside_the_even_case() -> None:
    spec = INT8
    (case,) = bench([spec], [CASES["decode-mixed"]], threads=1, settings=SMALL, tune="off").cases
    mixed, even = case.rows
    assert (mixed.case, even.case) == ("decode-mixed", "decode-even")
    assert mixed.nbytes == even.nbytes
    assert mixed.over_even is not None and even.over_even is None
    assert even.ratios == {spec.name: even.ratios[spec.name]} and even.ratios[spec.name].median == 1.0


def test_memory_that_comes_back_too_soon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.bench.ours.MOST_POOL", 1)
    (case,) = bench([WINDOWED], DECODE, threads=1, settings=SMALL, tune="off").cases
    (row,) = case.rows
    assert (row.sets, row.status) == (1, OK)
    assert row.nbytes == 2 * (7 + 1) * 2 * 64 * 2 * 2  # of 40 keys, those in the window
    assert "memory comes back after 0 MB" in row.message


def test_specs_of_other_shapes_are_not_compared() -> None:
    cases = bench([INT8, WINDOWED], DECODE, threads=1, settings=SMALL, tune="off").cases
    assert [len(case.rows) for case in cases] == [1, 1]
    assert len({case.shape for case in cases}) == 2


class Echo:
    """A contender that returns what it is told to."""

    name, format, tolerance, nbytes, sets = "echo", "bf16", 1.5e-2, 1, 1

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def call(self, turn: int) -> None:
        pass

    def results(self, turn: int) -> dict[str, torch.Tensor]:
        return {"out": self.out}


def test_a_lost_key_is_found() -> None:
    """Attention over all but the last key, of 2,000: a contender that masks one too many."""
    scene = Scene(free([2], 2000, None)[0], Shape(4, 1, 64, 64, 64**-0.5, True, None), 1)
    expected = Expected(scene)

    def right(out: torch.Tensor) -> bool:
        return all(verdict.right for verdict in expected.judge(Echo(out), 0))

    assert right(expected.exact["out"])
    k, v = (getattr(scene, side).float().view(2, 2000, 1, 64)[:, :-1].transpose(1, 2) for side in "kv")
    q = scene.q.float().view(2, 1, 4, 64)
    lost = torch.nn.functional.scaled_dot_product_attention(q, k, v).reshape(2, 4, 64)
    assert not right(lost)
    assert not right(expected.exact["out"][:1])  # another shape
    assert not right(expected.exact["out"] * float("nan"))


def test_no_type_of_a_peer_is_refused_silently() -> None:
    from kvgen.bench.peers.ggml import Flash

    scene = Scene(free([2], 40, None)[0], Shape(4, 1, 40, 40, 1.0, True, None), 1)
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        Flash(scene, "q8_0", "llama.cpp q8_0")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 9])
def test_the_two_yardsticks_agree(causal: bool, window: int | None) -> None:
    """The oracle's rows, of a spec that stores values as they are, are those of f32 arithmetic."""
    spec = make_spec("f32", "f32", group=2, mask=(causal, window))
    scene = Scene(free([3], 30, 5)[0], Shape.of(spec), 1)
    expected = Expected(scene)
    oracle = expected.oracle(spec, {}, {})["out"]
    assert len(expected.sample) == SAMPLED_ROWS
    assert abs(expected.exact["out"][expected.sample].double().numpy() - oracle).max() < 1e-5
