"""Cores, quotas, caches and the thread count, on made-up machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvgen.backends.cpu import machine
from kvgen.errors import ArgumentError


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]):
        write(tmp_path / f"cpu{cpu}/topology/physical_package_id", f"{package}\n")
        write(tmp_path / f"cpu{cpu}/topology/core_id", f"{core}\n")
    assert machine.count_physical(range(6), tmp_path) == 3
    assert machine.count_physical([0, 1], tmp_path) == 1
    assert machine.count_physical([0, 7, 8], tmp_path) == 3  # 7 and 8 have no files: cores of their own


def test_cache_sizes_take_the_data_side(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [(1, "Instruction", "32K"), (1, "Data", "48K"), (2, "Unified", "1024K"), (3, "Unified", "32M")]
    ):
        write(tmp_path / f"cpu3/cache/index{index}/level", str(level))
        write(tmp_path / f"cpu3/cache/index{index}/type", kind)
        write(tmp_path / f"cpu3/cache/index{index}/size", size)
    assert [machine.cache_bytes(3, n, tmp_path) for n in (1, 2, 3, 4)] == [48 << 10, 1 << 20, 32 << 20, 0]


def test_the_tightest_quota_of_all_ancestors_holds(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    write(own, "0::/a/b\n")
    root = tmp_path / "fs"
    assert machine.cpu_quota(root, own) is None
    write(root / "a/b/cpu.max", "max 100000\n")
    assert machine.cpu_quota(root, own) is None
    write(root / "a/cpu.max", "250000 100000\n")
    write(root / "cpu.max", "400000 100000\n")
    assert machine.cpu_quota(root, own) == 2.5


def test_version_1_quota(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    write(own, "4:memory:/x\n3:cpu,cpuacct:/x\n")
    write(tmp_path / "cpu/x/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu/x/cpu.cfs_period_us", "100000\n")
    assert machine.cpu_quota(tmp_path, own) is None
    write(tmp_path / "cpu/x/cpu.cfs_quota_us", "150000\n")
    assert machine.cpu_quota(tmp_path, own) == 1.5


def facts(physical: int, quota: float | None) -> machine.Machine:
    return machine.Machine(2 * physical, physical, quota, 0, 0, 4096, 0, "none")


@pytest.mark.parametrize(
    ("physical", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (8, 0.4, 1), (2, 100.0, 2), (1, None, 1)]
)
def test_usable_cores(physical: int, quota: float | None, usable: int) -> None:
    assert facts(physical, quota).usable_cores == usable


def test_huge_page_mode(tmp_path: Path) -> None:
    write(tmp_path / "enabled", "always [madvise] never\n")
    assert machine.huge_page_mode(tmp_path / "enabled") == "madvise"
    assert machine.huge_page_mode(tmp_path / "absent") == "none"


def test_this_machine_is_plausible() -> None:
    here = machine.snapshot()
    assert 1 <= here.usable_cores <= here.physical_cores <= here.logical_cores <= (os.cpu_count() or 1)
    assert here.page_bytes >= 4096


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_affinity_limits_the_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.snapshot().usable_cores == 1
    finally:
        os.sched_setaffinity(0, before)


def test_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGEN_NUM_THREADS", raising=False)
    assert machine.num_threads() == machine.snapshot().usable_cores
    monkeypatch.setenv("KVGEN_NUM_THREADS", "3")
    assert machine.num_threads() == 3
    assert machine.num_threads(1) == 1  # an argument wins
    for wrong in ("0", "-1", "two", "1.5", "²"):
        monkeypatch.setenv("KVGEN_NUM_THREADS", wrong)
        with pytest.raises(ArgumentError, match="KVGEN_NUM_THREADS"):
            machine.num_threads()
    for value in (0, -2, True, 1.5):
        with pytest.raises(ArgumentError, match="threads ="):
            machine.num_threads(value)  # type: ignore[arg-type]
