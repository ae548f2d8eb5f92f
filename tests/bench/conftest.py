"""One small run of every op, which several tests look at."""

from __future__ import annotations

import pytest

from kvgen.bench import Case, Report, Settings, bench
from kvgen.bench.cases import free
from kvgen.bench.peers.registry import PEERS
from tests.support.specs import make_spec

INT8 = make_spec(format_k="int8-token", format_v="bf16", q_dtype="bf16", group=4, head_dim=64)
F32 = make_spec(
    layout="nhd", format_k="f32", format_v="f32", q_dtype="f32", group=4, head_dim=64, page_size=8
)

SMALL = Settings(rounds=4, seconds=1e6, cold_bytes=1 << 18, waited=lambda: 0)
"""Nothing is dropped or cut short: what is looked at here is not the machine."""

CASES = [
    *free([2], 40, None),
    *free([2], 40, 3),
    *free([2], 20, 20),
    *free([1], 50, 20),
    Case("append-5", "append", count=5),
    Case("copy-48", "copy", count=48),
    Case("gather-2x40", "gather", (40, 40)),
]

TORCH = [peer for peer in PEERS.values() if peer.package == "torch" and not peer.slow]


@pytest.fixture(scope="session")
def small_report() -> Report:
    return bench([INT8, F32], CASES, peers=TORCH, threads=1, settings=SMALL, tune="off")
