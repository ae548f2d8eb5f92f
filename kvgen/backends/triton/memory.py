"""The memory behind tensor arguments, found without importing torch or numpy's torch bridge.

A kernel sees addresses, so what travels to the interpreter is memory, not tensors: the whole storage
of every argument, once. Two views of one slab then alias there as they do here, no matter who made them
(two torch views, a numpy array over a torch tensor), and strides and offsets need no care.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgen.errors import ArgumentError

# torch's and numpy's (and ml_dtypes') names of element types -> Triton's
_TRITON_TYPES = {
    "bool": "i1", "uint8": "u8", "int8": "i8", "uint16": "u16", "int16": "i16", "uint32": "u32",
    "int32": "i32", "uint64": "u64", "int64": "i64", "float16": "fp16", "bfloat16": "bf16",
    "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8", "float8_e5m2fnuz": "fp8e5b16",
}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """A range of this process's memory: ``[start, end)`` in bytes."""

    start: int
    end: int
    writable: bool = True

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory itself as uint8, not a copy. Valid while its owner lives."""
        size = self.end - self.start
        return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(self.start)), np.uint8)


@dataclass(frozen=True)
class Pointer:
    """A tensor argument as a kernel sees it."""

    address: int
    """Of its first element, in this process."""
    kind: str
    """Triton's pointer type, e.g. ``*bf16``."""
    storage: Region
    """All the memory it is a view of."""


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a torch tensor or a numpy array."""
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def pointer_to(name: str, tensor: Any) -> Pointer:
    """The pointer for a torch CPU tensor or a numpy array of any strides.

    Raises ArgumentError for other devices and for element types that Triton lacks.
    """
    element = (
        tensor.dtype.name if isinstance(tensor, np.ndarray) else str(tensor.dtype).removeprefix("torch.")
    )
    if element not in _TRITON_TYPES:
        raise ArgumentError(f"{name}: dtype {element}: Triton has no such element type")
    kind = f"*{_TRITON_TYPES[element]}"
    if isinstance(tensor, np.ndarray):
        owner = tensor
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        start, end = np.lib.array_utils.byte_bounds(owner) if owner.size else (owner.ctypes.data,) * 2
        return Pointer(tensor.ctypes.data, kind, Region(int(start), int(end), bool(tensor.flags.writeable)))
    if tensor.device.type != "cpu":
        raise ArgumentError(
            f"{name}: on device {tensor.device}; the interpreter takes CPU tensors, use .cpu()"
        )
    storage = tensor.untyped_storage()
    # not tensor.data_ptr(): that is 0 for an empty view of a storage that is not empty
    address = storage.data_ptr() + tensor.storage_offset() * tensor.element_size()
    return Pointer(address, kind, Region(storage.data_ptr(), storage.data_ptr() + storage.nbytes()))


def merged(regions: Iterable[Region]) -> list[Region]:
    """The same memory as disjoint regions in address order; empty ones are left out."""
    result: list[Region] = []
    for region in sorted((r for r in regions if r.end > r.start), key=lambda r: (r.start, r.end)):
        if result and region.start < result[-1].end:
            last = result.pop()
            region = Region(last.start, max(last.end, region.end), last.writable or region.writable)
        result.append(region)
    return result
