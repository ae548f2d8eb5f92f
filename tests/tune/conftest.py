"""A tuner that is quick enough for a test, and libraries with a fault in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.builder import assemble
from kvgen.ir.plan import KernelPlan
from kvgen.library import Library
from kvgen.tune import bucket, judge_cpu, model, moves, workload
from tests.support.faults import Faulty, small


@pytest.fixture
def broken() -> Callable[..., Library]:
    """A library with one text of its kernels replaced; fails where the text does not occur."""

    def make(old: str, new: str, **attention: Any) -> Library:
        def edit(plan: KernelPlan, text: str) -> str:
            assert old in text, f"{old!r} is not in the {plan.op} kernel any more: update the test"
            return text.replace(old, new)

        return assemble(small(**attention), "cpu", backend=Faulty(edit))

    return make


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short races on tiny workloads."""
    monkeypatch.setattr(judge_cpu, "BUDGET_S", {"quick": 0.01, "full": 0.01})
    monkeypatch.setattr(judge_cpu, "DUEL_S", {"quick": 0.05, "full": 0.05})
    monkeypatch.setattr(judge_cpu, "OP_S", {"quick": {}, "full": {}})
    sizes = {
        "append": ((8,),),
        "decode": ((1, 40), (2, 80)),
        "prefill": ((1, 8, 40),),
        "merge": ((2, 4),),
        "copy": ((2,),),
        "gather": ((1, 40),),
    }
    monkeypatch.setitem(bucket.BUCKETS, "quick", sizes)
    monkeypatch.setattr(workload, "POOL_LIMIT", 1 << 24)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the model propose nothing but the default with these changes, in this order."""

    def set_changes(*changes: dict[str, Any]) -> None:
        monkeypatch.setattr(
            model, "select", lambda space, default, *rest: [default, *(default.replace(**c) for c in changes)]
        )
        monkeypatch.setattr(moves, "neighbours", lambda *given: iter(()))

    return set_changes


@pytest.fixture
def tuning(tmp_path: Path) -> Path:
    """An empty folder for winners."""
    return tmp_path / "tune"
