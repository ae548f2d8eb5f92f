"""The name of the device on which candidates of a target are timed: part of the key of every timing."""

from __future__ import annotations

from pathlib import Path

from kvgen.backends.cpu import machine
from kvgen.ir import Target


def device_name(target: Target) -> str:
    """``AMD EPYC 9B14, 8 threads`` for a CPU target; empty for a GPU one, which is predicted, not timed."""
    return f"{_cpu_name()}, {machine.num_threads()} threads" if target.backend == "cpu" else ""


def _cpu_name() -> str:
    """The CPU's name as Linux gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "CPU"
