"""resolve: the name of a target -> the target as it is on this machine, and the backend that serves it."""

from __future__ import annotations

import dataclasses

from kvgen.backends.protocol import Backend
from kvgen.errors import UnsupportedError
from kvgen.ir import Target
from kvgen.targets import known_target


def resolve_target(name: str) -> Target:
    """The target called ``name``; ``cpu``, ``cuda`` and ``hip`` stand for the device present."""
    if name == "cpu" or name.startswith("cpu-"):
        from kvgen.backends.cpu import isa

        row = isa.resolve_target(name)
        return dataclasses.replace(known_target(row.target), features=isa.default_features(row))
    if name in ("cuda", "hip"):
        from kvgen.backends.triton.launch_device import present_target

        return known_target(present_target(name))
    return known_target(name)


def backend_for(target: Target) -> Backend:
    """The backend of a target."""
    if target.backend == "cpu":
        from kvgen.backends.cpu.backend import CpuBackend

        return CpuBackend()
    if target.backend == "triton":
        from kvgen.backends.triton.backend import TritonBackend

        return TritonBackend()
    raise UnsupportedError(f"no backend {target.backend!r}")
