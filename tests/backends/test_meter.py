"""Limits charge what a process ran and slept, not what it waited for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvgen.backends import meter
from kvgen.backends.cpu.process import CompilerTimeout, invoke
from kvgen.backends.meter import Meter

Threads = dict[int, dict[str, tuple[int, int]]]
S = 10**9


class Machine:
    """A clock and counters that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.threads = 100.0, dict[int, dict[str, tuple[int, int]]]()
        monkeypatch.setattr(meter.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(meter, "_threads", lambda pid: self.threads)

    def at(self, seconds: float, threads: Threads) -> None:
        self.now, self.threads = 100.0 + seconds, threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_waiting_for_a_core_is_not_charged(machine: Machine) -> None:
    machine.threads = {7: {"7": (5 * S, 3 * S)}}
    found = Meter(7)
    machine.at(10, {7: {"7": (6 * S, 12 * S)}})
    assert found.seconds() == pytest.approx(1.0), "ran for 1 s and waited for 9"
    assert found.pause(3.0) == meter.TICK_S
    assert found.pause(1.5) == pytest.approx(0.5)
    assert found.pause(1.0) == 0.0


def test_a_process_that_sleeps_is_charged_the_clock(machine: Machine) -> None:
    machine.threads = {7: {"7": (5 * S, 3 * S)}}
    found = Meter(7)
    machine.at(10, {7: {"7": (5 * S, 3 * S)}})
    assert found.seconds() == pytest.approx(10.0)


def test_threads_that_wait_side_by_side_do_not_stop_the_count(machine: Machine) -> None:
    """A team that spins in a barrier while one of it waits: what the busiest ran is charged."""
    found = Meter(7)
    machine.at(10, {7: {"7": (9 * S, 0), "8": (1 * S, 9 * S)}})
    assert found.seconds() == pytest.approx(9.0)
    found = Meter(7)
    machine.at(30, {7: {"7": (12 * S, 17 * S)}, 9: {"9": (2 * S, 18 * S)}})
    assert found.seconds() >= 5.0, "two that wait at once waited no longer than the clock says"


def test_what_ended_steps_of_a_compiler_waited_is_remembered(machine: Machine) -> None:
    found = Meter(7)
    driver = {"7": (0, 0)}
    machine.at(20, {7: driver, 8: {"8": (4 * S, 16 * S)}})
    assert found.seconds() == pytest.approx(4.0)
    machine.at(21, {7: driver, 9: {"9": (1 * S, 0)}})
    assert found.seconds() == pytest.approx(5.0)


def test_without_counters_a_crowd_slows_the_clock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_threads", lambda pid: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, charged in ((0.5, 12.0), (6.0, 4.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        machine.now = 100.0
        found = Meter(7)
        machine.at(12, {})
        assert found.seconds() == pytest.approx(charged)


@pytest.mark.skipif(not meter._counted(), reason="this system does not count what threads ran")
def test_children_are_counted_and_ended_ones_are_no_fault() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7)); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        watch = Meter(process.pid)
        while len(found := meter._threads(process.pid) or {}) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        assert process.pid in found
        process.communicate(b"\n")
        assert watch.seconds() > 0


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(600)", "while True: pass"], ids=["sleeps", "spins"]
)
def test_what_does_not_end_is_ended(tmp_path: Path, code: str) -> None:
    with pytest.raises(CompilerTimeout, match=r"was killed after 0\.3 s"):
        invoke([sys.executable, "-c", code], cwd=tmp_path, timeout_s=0.3)
