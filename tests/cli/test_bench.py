"""kvgen bench: what a report holds; nothing here judges a speed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvgen.bench import bench_decode
from kvgen.cli import app
from kvgen.errors import KvgenError, UnsupportedError
from kvgen.runtime.ops import CacheOps
from tests.support.specs import make_spec

SMALL = make_spec(layout="hnd", format_k="int8-token", format_v="bf16", q_dtype="bf16", group=4, head_dim=64)


def test_a_report_is_consistent() -> None:
    report = bench_decode(SMALL, batch=2, context=40, threads=1, rounds=3, tune="off")
    ours, peer = report.rows
    assert (ours.contender, ours.ratio) == ("kvgen", 1.0)
    assert peer.ratio == pytest.approx(peer.median_us / ours.median_us)
    assert report.fraction_of_read_limit == pytest.approx(ours.gb_per_s / report.read_limit_gb_per_s)
    assert 0 < report.largest_difference < 0.02


def test_wrong_outputs_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = CacheOps.decode

    def scaled(self, *args, **keywords):
        out, lse = decode(self, *args, **keywords)
        return out.mul_(1.1), lse

    monkeypatch.setattr(CacheOps, "decode", scaled)
    with pytest.raises(KvgenError, match="nothing was timed"):
        bench_decode(SMALL, batch=1, context=16, threads=1, rounds=3, tune="off")


def test_a_window_has_no_peer() -> None:
    with pytest.raises(UnsupportedError, match="window"):
        bench_decode(make_spec(layout="hnd", mask=(True, 33)), batch=1, context=16)


def test_the_command_prints_json(repo_root) -> None:
    spec = str(repo_root / "examples" / "llama3-8b-bf16.toml")
    done = CliRunner().invoke(
        app, ["bench", spec, "--batch", "1", "--context", "32", "--rounds", "3", "--json"]
    )
    assert done.exit_code == 0, done.output
    (report,) = json.loads(done.stdout)
    assert report["context"] == 32
    assert [row["contender"] for row in report["rows"]] == ["kvgen", "torch SDPA, folded"]
