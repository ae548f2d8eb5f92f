"""The fuzzer, for a few seconds and for ten minutes; and what it must be able to find."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from tests.fuzz.__main__ import fuzz, summary, watch
from tests.fuzz.judge import judge
from tests.fuzz.scene import Call, Memory


def test_some_calls() -> None:
    """A fixed number of calls of a fixed seed: the same in every run."""
    count, found = fuzz(60.0, seed=1, specs=5, last=799)
    assert not found, summary(found)
    assert count > 200  # of a slow machine, in a minute


@pytest.mark.slow
def test_ten_minutes() -> None:
    _, found = fuzz(600.0, seed=2, specs=24)
    assert not found, summary(found)


def raising(error: BaseException) -> Any:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "allowed"),
    [
        (ArgumentError("scale = 0: give a positive number"), True),
        (ArgumentError("x" * 5000), False),
        (TypeError("decode() got an unexpected keyword argument 'window'"), True),
        (TypeError("'<' not supported between instances of 'str' and 'int'"), False),
        (RuntimeError("sparse"), False),
        (AssertionError(), False),
    ],
    ids=repr,
)
def test_what_a_call_may_raise(error: BaseException, allowed: bool) -> None:
    _, finding = judge(Call("a call", raising(error), {}), Memory())
    assert (finding is None) == allowed


def test_writes_are_seen() -> None:
    memory = Memory()
    out, other = memory.place(torch.zeros(4)), memory.place(torch.zeros(4))

    def check(run: Any) -> str:
        _, finding = judge(Call("write", run, {}, writes=lambda call: [out[:2]]), memory)
        memory.keep()
        return "" if finding is None else finding.what

    assert check(lambda: out[:2].fill_(1)) == ""
    assert "byte 11 of buffer 0 (16 bytes) changed" in check(lambda: out[1:].fill_(2))
    assert "of buffer 1 (16 bytes)" in check(lambda: other.fill_(3))
    past = out.as_strided((5,), (1,))  # into the guard bytes
    assert "byte 16 of buffer 0" in check(lambda: past[4:].fill_(0))


def test_results_are_looked_at() -> None:
    call = Call("a call", lambda: 5, {}, check=lambda call, result: f"returned {result}")
    _, finding = judge(call, Memory())
    assert finding is not None and finding.what == "returned 5"


def test_a_dead_worker_is_told_with_its_last_call(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = f"import os; open({str(note)!r}, 'w').write('7\\tdecode (q: freed)'); os.kill(os.getpid(), 11)"
    number, finding, _ = watch([sys.executable, "-c", code], note, 5, 1.0)
    assert number == 8 and finding is not None
    assert finding.call == "decode (q: freed)" and signal.SIGSEGV.name in finding.where
