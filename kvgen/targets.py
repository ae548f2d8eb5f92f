"""The registered targets and the facts plans and cost models may rest on.

Bandwidths and clocks are data-sheet figures of one common product of each architecture; they rank
candidates where no device can be timed, and are never presented as measurements.
"""

from __future__ import annotations

from kvgen.errors import UnsupportedError, brief
from kvgen.ir import Target
from kvgen.names import TARGET, suggest

KB = 1024

_GPUS = (
    # A100-SXM 80 GB: 108 SMs, 2.04 TB/s, 1.41 GHz, 164 KB shared memory for one block.
    Target("sm_80", "triton", "sm_80", (), 163 * KB, 108, 2.04e12, 1.41e9),
    # L40S: 142 SMs, 0.864 TB/s, 2.52 GHz.
    Target("sm_89", "triton", "sm_89", (), 99 * KB, 142, 0.864e12, 2.52e9),
    # H100-SXM: 132 SMs, 3.35 TB/s, 1.755 GHz.
    Target("sm_90", "triton", "sm_90", (), 227 * KB, 132, 3.35e12, 1.755e9),
    # B200: 148 SMs, 8 TB/s, 1.965 GHz.
    Target("sm_100", "triton", "sm_100", (), 227 * KB, 148, 8.0e12, 1.965e9),
    # RTX 5090: 170 SMs, 1.79 TB/s, 2.41 GHz.
    Target("sm_120", "triton", "sm_120", (), 99 * KB, 170, 1.79e12, 2.41e9),
    # MI300X: 304 compute units, 5.3 TB/s, 2.1 GHz, 64-wide wavefronts.
    Target("gfx942", "triton", "gfx942", (), 64 * KB, 304, 5.3e12, 2.1e9, 64),
    Target("interpret", "triton", "interpret", (), 227 * KB, 1),
)
_CPUS = tuple(Target(f"cpu-{row}", "cpu", row) for row in ("avx512", "avx2", "portable"))

TARGETS: dict[str, Target] = {target.name: target for target in _CPUS + _GPUS}
"""Registered targets by name."""

ALIASES = ("cpu", "cuda", "hip")
"""Names that stand for the device present."""


def known_target(name: str) -> Target:
    """The registered target ``name``; ``UnsupportedError`` names the nearest one."""
    if name in TARGETS:
        return TARGETS[name]
    meant = suggest(name, [*TARGETS, *ALIASES], TARGET)
    hint = f"did you mean {meant!r}?" if meant else "see the list"
    raise UnsupportedError(
        f"target {brief(name)} is not known; {hint} Known: {', '.join([*ALIASES, *TARGETS])}"
    )
