"""This machine as the CPU kernels see it: usable cores, caches, pages, and the thread count that follows.

Figures come from Linux's ``/proc`` and ``/sys``; where those are absent the affinity or the CPU count stands
in, and a cache size is 0 (unknown). Nothing that can change while a process runs (affinity, quota, page mode)
is kept for longer than a second.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvgen.errors import ArgumentError, brief

MAX_THREADS = 1024
"""Most threads of one kernel. An OpenMP runtime asked for more than it can start ends the process."""

_threaded = False
"""Whether kernels of this process were given several threads."""
_forked = False
"""Whether this process was forked from one in which ``_threaded`` held."""

_CPUS = Path("/sys/devices/system/cpu")
_THP = Path("/sys/kernel/mm/transparent_hugepage")


@dataclass(frozen=True)
class Machine:
    """A snapshot of the facts that schedules and benchmarks ask for."""

    logical_cores: int
    """Hardware threads this process may run on (its affinity mask)."""
    physical_cores: int
    """Distinct cores among those: a core's second hardware thread adds no bandwidth."""
    cpu_quota: float | None
    """Cores' worth of time that the control group allows; None = no limit."""
    l2_bytes: int
    """Size of one core's L2 cache; 0 = unknown."""
    l3_bytes: int
    """Size of the last-level cache seen by one core; 0 = unknown."""
    page_bytes: int
    """Base page size."""
    huge_page_bytes: int
    """Size of a transparent huge page; 0 = this kernel has none."""
    huge_page_mode: str
    """``always``, ``madvise``, ``never``, or ``none`` where the kernel has no transparent huge pages."""

    @property
    def usable_cores(self) -> int:
        """Threads that can really run at once: physical cores, limited by the quota; at least 1."""
        quota = math.inf if self.cpu_quota is None else self.cpu_quota
        return max(1, int(min(self.physical_cores, quota)))


def snapshot() -> Machine:
    """Read the facts of this machine as they are now (well under a millisecond)."""
    allowed = affinity()
    first = min(allowed)
    return Machine(
        logical_cores=len(allowed),
        physical_cores=count_physical(allowed),
        cpu_quota=cpu_quota(),
        l2_bytes=cache_bytes(first, 2),
        l3_bytes=cache_bytes(first, 3),
        page_bytes=mmap.PAGESIZE,
        huge_page_bytes=_integer(_THP / "hpage_pmd_size") or 0,
        huge_page_mode=huge_page_mode(),
    )


def affinity() -> frozenset[int]:
    """The logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def count_physical(cpus: Iterable[int], root: Path = _CPUS) -> int:
    """How many cores the logical ``cpus`` belong to; one without topology files counts as a core."""
    cores: set[object] = set()
    for cpu in cpus:
        topology = root / f"cpu{cpu}" / "topology"
        package, core = _integer(topology / "physical_package_id"), _integer(topology / "core_id")
        cores.add(("alone", cpu) if package is None or core is None else (package, core))
    return len(cores)


def cache_bytes(cpu: int, level: int, root: Path = _CPUS) -> int:
    """Bytes of the data or unified cache of ``level`` that ``cpu`` uses; 0 = unknown."""
    for entry in sorted((root / f"cpu{cpu}" / "cache").glob("index*")):
        kind = _text(entry / "type")
        if _integer(entry / "level") == level and kind in ("Data", "Unified"):
            size = _text(entry / "size") or "0"
            scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:].upper(), 1)
            digits = size.rstrip("KMGkmg")
            return int(digits) * scale if digits.isdigit() else 0
    return 0


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time the tightest enclosing control group allows (v2 ``cpu.max``, v1 ``cfs_quota``)."""
    limits: list[float] = []
    for line in (_text(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root if not controllers else root / "cpu"
        # Every ancestor's limit holds too. A container often sees only its own group, mounted as the root.
        parts = Path(path.lstrip("/")).parts
        for folder in [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]:
            if limit := _quota_of(folder):
                limits.append(limit)
    return min(limits, default=None)


def _quota_of(folder: Path) -> float | None:
    """The limit set in one control group's folder, either version's files."""
    words = (_text(folder / "cpu.max") or "").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def huge_page_mode(path: Path = _THP / "enabled") -> str:
    """The bracketed word of the kernel's setting, e.g. ``madvise`` for ``always [madvise] never``."""
    text = _text(path) or ""
    start, end = text.find("["), text.find("]")
    return text[start + 1 : end] if 0 <= start < end else "none"


def num_threads(requested: int | None = None) -> int:
    """Threads a kernel should use: ``requested``, else ``$KVGEN_NUM_THREADS``, else the usable cores.

    The number is an *argument of every kernel*, which opens ``#pragma omp parallel num_threads(threads)``.
    The runtime's own setting (``omp_set_num_threads``, ``OMP_NUM_THREADS``) is neither read nor written,
    because torch shares it (see the ``openmp`` module).

    In the child of a fork it is 1 (with one warning) where the parent has used more: GCC's OpenMP would wait
    there for ever for threads that the fork did not copy. Results don't depend on the number.

    Raises:
        ArgumentError: not a whole number from 1 to ``MAX_THREADS``.
    """
    global _threaded
    count = _wanted_threads(requested)
    if count > 1 and _forked:
        warnings.warn(
            "this process was forked after kernels ran with several threads; kernels use one thread here. "
            "Start workers with multiprocessing's 'spawn' to use more.",
            RuntimeWarning,
            stacklevel=2,
        )
        return 1
    _threaded = _threaded or count > 1
    return count


def _note_fork() -> None:
    global _forked
    _forked = _forked or _threaded


os.register_at_fork(after_in_child=_note_fork)


# The dict behind ``os.environ``: a miss there raises and catches inside, 0.7 us on the path of every call.
_environment = getattr(os.environb, "_data", os.environb)


def _wanted_threads(requested: int | None) -> int:
    want = f"must be a whole number from 1 to {MAX_THREADS}"
    if requested is not None:
        if isinstance(requested, bool) or not isinstance(requested, int) or not 0 < requested <= MAX_THREADS:
            raise ArgumentError(f"num_threads = {brief(requested)}: {want}")
        return requested
    raw = _environment.get(b"KVGEN_NUM_THREADS")
    value = raw.decode(errors="replace").strip() if raw else ""
    if not value:
        return _default_threads()
    if not re.fullmatch("[0-9]{1,9}", value) or not 0 < int(value) <= MAX_THREADS:
        raise ArgumentError(f"KVGEN_NUM_THREADS = {value!r}: {want}; unset it for all cores")
    return int(value)


def _default_threads() -> int:
    """The usable cores, looked up again once a second: that costs half a millisecond, a small decode 5 us."""
    global _default
    now = time.monotonic()
    if now >= _default[0]:
        _default = (now + 1.0, min(snapshot().usable_cores, MAX_THREADS))
    return _default[1]


_default = (0.0, 1)
"""Until when (monotonic seconds) the default thread count holds, and the count."""


def _text(path: Path) -> str | None:
    """The stripped text of a small kernel file; None where it does not exist or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _integer(path: Path) -> int | None:
    """The whole number in a small kernel file; None where there is none."""
    text = _text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
