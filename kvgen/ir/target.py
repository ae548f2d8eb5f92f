"""Target: a backend, an architecture, and the facts a plan may rest on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Where a kernel will run. ``kvgen.targets`` holds the registered ones."""

    name: str
    """``cpu-avx512``, ``sm_90``, ``gfx942``, ``interpret``, ..."""
    backend: str
    """``cpu`` or ``triton``."""
    arch: str
    """``avx512``, ``avx2``, ``portable``, ``sm_90``, ``gfx942``, ..."""
    features: tuple[str, ...] = ()
    """Optional instructions present, e.g. ``bf16``; part of every artefact's key."""
    smem_bytes: int = 0
    """Shared memory one GPU block may use."""
    sms: int = 0
    """Streaming multiprocessors (compute units)."""
    hbm_bytes_per_s: float = 0.0
    """Memory bandwidth, bytes per second (data sheet); 0 where it is measured instead."""
    clock_hz: float = 0.0
    """Boost clock, cycles per second (data sheet)."""
    warp: int = 32
    """Threads of a warp (wavefront)."""

    @property
    def interpreted(self) -> bool:
        """Whether Triton kernels run in the interpreter."""
        return self.arch == "interpret"
