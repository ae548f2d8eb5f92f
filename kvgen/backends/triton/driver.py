"""driver: the part of NVIDIA's driver API that loads a cubin, launches it and times it, through ctypes.

It retains the device's primary context, which is the one that torch uses: addresses, streams and events of
both are the same. Needs neither triton nor torch. Every call's result is looked at, and an error is told by
the driver's own words.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError, ToolchainError

LIBRARY = "libcuda.so.1"
"""The driver as Linux's loader knows it."""

FREE_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a block gets without asking for more."""

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

NAME_BYTES = 256

_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_OUT = ctypes.POINTER

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_OUT(_INT),),
    "cuGetErrorName": (_INT, _OUT(ctypes.c_char_p)),
    "cuGetErrorString": (_INT, _OUT(ctypes.c_char_p)),
    "cuDeviceGet": (_OUT(_INT), _INT),
    "cuDeviceGetName": (ctypes.c_char_p, _INT, _INT),
    "cuDeviceGetAttribute": (_OUT(_INT), _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_OUT(_POINTER), _INT),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (_OUT(_POINTER), _POINTER),
    "cuModuleGetFunction": (_OUT(_POINTER), _POINTER, ctypes.c_char_p),
    "cuModuleUnload": (_POINTER,),
    "cuFuncSetAttribute": (_POINTER, _INT, _INT),
    "cuLaunchKernel": (
        _POINTER, _UINT, _UINT, _UINT, _UINT, _UINT, _UINT, _UINT, _POINTER, _POINTER, _POINTER,
    ),
    "cuEventCreate": (_OUT(_POINTER), _UINT),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventSynchronize": (_POINTER,),
    "cuEventElapsedTime": (_OUT(ctypes.c_float), _POINTER, _POINTER),
    "cuEventDestroy_v2": (_POINTER,),
}  # fmt: skip
"""The functions that are called, and their parameters. Where there are two, the name is that of the ABI that
``cuda.h`` has selected since CUDA 4."""

ATTRIBUTES = {"major": 75, "minor": 76, "sms": 16, "l2_bytes": 38, "shared_bytes": 97}
"""Of ``cuDeviceGetAttribute``: compute capability, multiprocessors, L2 cache, shared memory of a block."""


@dataclass(frozen=True)
class Device:
    """What the driver says about a GPU."""

    name: str
    target: str
    """``sm_90``."""
    sms: int
    l2_bytes: int
    shared_bytes: int
    """Most shared memory that a block may ask for."""
    driver: str
    """Newest CUDA that the driver serves, e.g. ``13.0``."""


class Driver:
    """One GPU through its driver. Raises ``ToolchainError`` where there is no driver or no such GPU."""

    def __init__(self, library: str | Path = LIBRARY, ordinal: int = 0) -> None:
        """``library``: the driver's shared library; ``ordinal``: which GPU, as CUDA counts them."""
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise ToolchainError(f"{library}: no driver of NVIDIA's here ({error})") from None
        self._functions = {name: self._function(name) for name in SIGNATURES}
        self._call("cuInit", 0)
        device, context = _INT(), _POINTER()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context

    def _function(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise ToolchainError(f"{self._library._name}: has no {name}; update the driver") from None
        function.argtypes, function.restype = SIGNATURES[name], _INT
        return function

    def _call(self, name: str, *arguments: Any) -> None:
        """Call; ``ToolchainError`` with the error's name and the driver's words where it fails."""
        if status := self._functions[name](*arguments):
            raise ToolchainError(f"{name}: {self._words(status)}")

    def _words(self, status: int) -> str:
        found = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if self._functions[name](status, ctypes.byref(text)) == 0 and text.value:
                found.append(text.value.decode(errors="replace"))
        return f"{found[0]} ({found[1]})" if len(found) == 2 else f"error {status}"

    def device(self) -> Device:
        """The GPU's name and limits."""
        name, version = ctypes.create_string_buffer(NAME_BYTES), _INT()
        self._call("cuDeviceGetName", name, NAME_BYTES, self._device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        found = {}
        for key, number in ATTRIBUTES.items():
            value = _INT()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
            found[key] = value.value
        return Device(
            name.value.decode(errors="replace"),
            f"sm_{found['major']}{found['minor']}",
            found["sms"],
            found["l2_bytes"],
            found["shared_bytes"],
            f"{version.value // 1000}.{version.value % 1000 // 10}",
        )

    def load(self, cubin: bytes, kernel: str, shared: int) -> Function:
        """The function ``kernel`` of a cubin; ``shared``: bytes of dynamic shared memory of a block."""
        self._call("cuCtxSetCurrent", self._context)
        module, function = _POINTER(), _POINTER()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        if shared > FREE_SHARED_BYTES:
            self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
        return Function(self, kernel, function, shared)

    def launch(
        self, function: Any, grid: Sequence[int], threads: int, shared: int, stream: int, parameters: Any
    ) -> None:
        """Start a grid of up to three dimensions on a stream (0: the default one, which torch uses)."""
        if not 1 <= len(grid) <= 3 or any(n < 1 for n in grid):
            raise ArgumentError(f"grid = {tuple(grid)}: give one to three positive sizes")
        x, y, z = (*grid, 1, 1)[:3]
        self._call("cuCtxSetCurrent", self._context)
        self._call(
            "cuLaunchKernel", function, x, y, z, threads, 1, 1, shared, stream, parameters, None
        )  # fmt: skip

    def synchronize(self) -> None:
        """Wait for all work; what failed on the device since the last time is raised here."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuCtxSynchronize")

    def event(self) -> Event:
        """A point in a stream whose time can be read."""
        self._call("cuCtxSetCurrent", self._context)
        handle = _POINTER()
        self._call("cuEventCreate", ctypes.byref(handle), 0)
        return Event(self, handle)


class Function:
    """A kernel that is loaded; it stays so until the process ends."""

    def __init__(self, driver: Driver, name: str, handle: Any, shared: int) -> None:
        self.driver, self.name, self.shared = driver, name, shared
        self._handle = handle

    def launch(self, grid: Sequence[int], threads: int, parameters: Any, stream: int = 0) -> None:
        """Start it; ``parameters``: an array of addresses, one for each parameter."""
        self.driver.launch(self._handle, grid, threads, self.shared, stream, parameters)


class Event:
    """A time mark on a stream."""

    def __init__(self, driver: Driver, handle: Any) -> None:
        self._driver, self._handle = driver, handle

    def record(self, stream: int = 0) -> None:
        """Mark the stream's present end."""
        self._driver._call("cuEventRecord", self._handle, stream)

    def wait(self) -> None:
        """Until the device has passed the mark."""
        self._driver._call("cuEventSynchronize", self._handle)

    def seconds_since(self, start: Event) -> float:
        """Device time between two marks that have been passed."""
        milliseconds = ctypes.c_float()
        self._driver._call("cuEventElapsedTime", ctypes.byref(milliseconds), start._handle, self._handle)
        return milliseconds.value / 1e3

    def close(self) -> None:
        """Give the mark back."""
        self._driver._call("cuEventDestroy_v2", self._handle)
