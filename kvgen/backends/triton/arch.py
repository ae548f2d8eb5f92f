"""The GPU architectures the Triton tool chain compiles for, and the limits a compile must respect.

Only what decides whether a binary can be loaded at all. Bandwidths and instruction rates belong to
the target's table of facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgen.errors import UnsupportedError


@dataclass(frozen=True)
class GpuArch:
    """One architecture as Triton names it."""

    name: str
    """kvgen's name, e.g. ``sm_90`` or ``gfx942``."""
    backend: Literal["cuda", "hip"]
    arch: int | str
    """What ``GPUTarget`` takes: 90 for sm_90, "gfx942" for AMD."""
    warp_size: int
    """Threads a warp (NVIDIA) or a wavefront (AMD)."""
    max_shared_bytes: int
    """Most shared memory (LDS) one block can ask for, in bytes."""

    @property
    def binary_suffix(self) -> Literal["cubin", "hsaco"]:
        """Suffix of the loadable binary."""
        return "cubin" if self.backend == "cuda" else "hsaco"

    @property
    def assembly_suffix(self) -> Literal["ptx", "amdgcn"]:
        """Suffix of the assembly text kept beside the binary."""
        return "ptx" if self.backend == "cuda" else "amdgcn"


# Shared memory: CUDA programming guide, "technical specifications per compute capability" (opt-in
# maximum of a block); CDNA3 ISA guide for LDS.
_ARCHS = {
    arch.name: arch
    for arch in (
        GpuArch("sm_80", "cuda", 80, 32, 163 * 1024),
        GpuArch("sm_89", "cuda", 89, 32, 99 * 1024),
        GpuArch("sm_90", "cuda", 90, 32, 227 * 1024),
        GpuArch("sm_100", "cuda", 100, 32, 227 * 1024),
        GpuArch("sm_120", "cuda", 120, 32, 99 * 1024),
        GpuArch("gfx942", "hip", "gfx942", 64, 64 * 1024),
    )
}

ARCH_NAMES: tuple[str, ...] = tuple(_ARCHS)
"""Every architecture name ``gpu_arch`` accepts."""


def gpu_arch(name: str) -> GpuArch:
    """The architecture called ``name``; UnsupportedError lists the known names otherwise."""
    try:
        return _ARCHS[name]
    except KeyError:
        known = ", ".join(ARCH_NAMES)
        raise UnsupportedError(
            f"target {name!r}: not an architecture Triton is compiled for here; use one of {known}"
        ) from None
