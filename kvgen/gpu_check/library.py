"""library: the ops of a prepared spec, from its cubins: a kernel is loaded when it is first asked for."""

from __future__ import annotations

from pathlib import Path

from kvgen.backends.triton.cubin import CubinKernel
from kvgen.backends.triton.driver import Driver
from kvgen.errors import UnsupportedError
from kvgen.gpu_check.folder import Candidate, Prepared
from kvgen.ir import Schedule
from kvgen.runtime.ops import CacheOps
from kvgen.targets import known_target


class CubinLibrary(CacheOps):
    """The six ops of a prepared spec on one GPU, with the default schedules unless others are ``chosen``."""

    def __init__(self, folder: Path, prepared: Prepared, driver: Driver, target: str, device: str) -> None:
        """``device``: where torch puts the caches: ``cuda``, or ``cpu`` in a rehearsal."""
        self.spec, self.record, self.checked = prepared.spec, prepared.record, False
        self.target = known_target(target)
        self.prepared, self.driver = prepared, driver
        self.chosen: dict[str, Schedule] = {}
        """By op, a schedule that takes the place of the default."""
        self._folder, self._device = folder, device
        self._loaded: dict[int, CubinKernel] = {}

    @property
    def device(self) -> str:
        """Where caches live."""
        return self._device

    def candidate(self, op: str, variant: str = "") -> Candidate:
        """The candidate that stands for an op and variant; ``UnsupportedError`` where none was prepared."""
        found = self.prepared.of(op, variant)
        schedule = self.chosen.get(op, found[0].schedule if found else None)
        for candidate in found:
            if candidate.schedule == schedule:
                return candidate
        raise UnsupportedError(f"{op} {variant}".strip() + f" with {schedule}: not in {self._folder}")

    def kernel(self, op: str, variant: str = "") -> CubinKernel:
        """The kernel of ``op``, in the driver's hands."""
        candidate = self.candidate(op, variant)
        if id(candidate) not in self._loaded:
            parts = [binary.part(self._folder) for binary in candidate.binaries]
            self._loaded[id(candidate)] = CubinKernel(candidate.plan, parts, self.driver)
        return self._loaded[id(candidate)]
