"""cubin: compiled kernels of an op and all that a launch of them needs, without triton.

A ``Part`` is one kernel: its cubin, its parameters in order, threads and shared memory. ``CubinKernel`` is
what the ops launch: grids and values come from ``launch``, which reads a plan, or whatever has a plan's
answers. Triton appends two pointers of its own to every kernel (global and profile scratch): null where the
kernel asks for none, which all of ours must.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.backends.triton.driver import Driver, Function
from kvgen.backends.triton.elf import cubin_facts
from kvgen.backends.triton.launch import address, arguments, launches, workspace_bytes
from kvgen.errors import ToolchainError

CTYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
"""Scalar parameters by Triton's names; everything with ``*`` is a pointer."""

HIDDEN = 2
"""Pointers that Triton 3.5.1 and later append."""


@dataclass(frozen=True)
class Part:
    """One kernel of an op."""

    name: str
    signature: tuple[tuple[str, str], ...]
    """(name, Triton type) of the parameters in order, the hidden ones not among them."""
    num_warps: int
    shared: int
    """Bytes of dynamic shared memory of a block."""
    scratch: int
    """Bytes of global scratch that a block asks for."""
    cubin: bytes


class CubinKernel:
    """An op on a GPU, from binaries."""

    def __init__(self, plan: Any, parts: Sequence[Part], driver: Driver) -> None:
        """``plan``: a ``KernelPlan``, or a record of one with the same answers.

        Raises ``ToolchainError`` for a kernel that needs scratch, or whose binary takes other parameters.
        """
        self.plan = plan
        self._loaded = {part.name: Loaded(part, driver) for part in parts}

    def workspace(self, values: Mapping[str, Any]) -> int:
        """Bytes of workspace for these values."""
        return workspace_bytes(self.plan, values)

    def launch(self, values: Mapping[str, Any]) -> None:
        """Run the op on the default stream; it is not waited for."""
        for launch in launches(self.plan, values):
            self._loaded[launch.entry.name].run(launch.grid, arguments(launch, values))

    def bound(self, values: Mapping[str, Any]) -> list[Bound]:
        """The launches of one call, packed: what a timing loop repeats. The values must outlive them."""
        return [
            self._loaded[launch.entry.name].bind(launch.grid, arguments(launch, values))
            for launch in launches(self.plan, values)
        ]

    def resources(self) -> dict[str, Any]:
        """Nothing: the binaries were inspected where they were made."""
        return {}


class Loaded:
    """A kernel in the driver's hands."""

    def __init__(self, part: Part, driver: Driver) -> None:
        if part.scratch:
            raise ToolchainError(f"{part.name}: needs {part.scratch} bytes of global scratch a block")
        sizes = [8] * HIDDEN
        sizes[:0] = [8 if kind.startswith("*") else ctypes.sizeof(CTYPES[kind]) for _, kind in part.signature]
        found = [parameter.size for parameter in cubin_facts(part.cubin, part.name).parameters]
        if found != sizes:
            raise ToolchainError(f"{part.name}: the binary takes parameters of {found} bytes, not {sizes}")
        self.part = part
        self._function: Function = driver.load(part.cubin, part.name, part.shared)

    def bind(self, grid: Sequence[int], values: Mapping[str, Any]) -> Bound:
        """Pack one launch."""
        held: list[Any] = []
        for name, kind in self.part.signature:
            value = values[name]
            held.append(ctypes.c_void_p(address(value)) if kind.startswith("*") else CTYPES[kind](value))
        held += [ctypes.c_void_p(None) for _ in range(HIDDEN)]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        return Bound(self._function, tuple(grid), 32 * self.part.num_warps, held, places)

    def run(self, grid: Sequence[int], values: Mapping[str, Any]) -> None:
        """Pack and launch."""
        self.bind(grid, values).run()


@dataclass(frozen=True)
class Bound:
    """A launch, ready to be made any number of times."""

    function: Function
    grid: tuple[int, ...]
    threads: int
    values: Sequence[Any]
    """What ``places`` points to."""
    places: Any

    def run(self) -> None:
        """Launch on the default stream."""
        self.function.launch(self.grid, self.threads, self.places)
