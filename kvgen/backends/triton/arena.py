"""The memory that a caller and its interpreter share: one mapped file, with guards between storages."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvgen.backends.triton.memory import Region
from kvgen.errors import ArgumentError, ToolchainError

_GUARD = 4096
"""Bytes before, between and after the storages."""
_POISON = 0xFF
"""What guards hold: NaN as bf16, f16 and f32, -1 as a page id. A read past a tensor shows, and a write
is found after the launch."""


class Arena:
    """A mapped file that holds the storages of one launch at a time; it grows and never shrinks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._generation = 0
        self._map: mmap.mmap | None = None
        self.path = folder / "arena-0"
        self.size = 0
        self._placed: list[tuple[Region, int]] = []

    def place(self, regions: list[Region]) -> None:
        """Copy disjoint ``regions`` in. A later ``place`` replaces them."""
        self._placed = []
        at = _GUARD
        for region in regions:
            self._placed.append((region, at))
            at += -(-(region.end - region.start) // 64) * 64 + _GUARD  # guards start on a 64-byte line
        self._reserve(at)
        memory = self._memory()
        for start, end in self._guards():
            memory[start:end] = _POISON
        for region, offset in self._placed:
            memory[offset : offset + region.end - region.start] = region.bytes()

    def _guards(self) -> list[tuple[int, int]]:
        """(start, end) of everything in use that belongs to no storage."""
        guards = [(0, _GUARD)]
        for region, offset in self._placed:
            start = offset + region.end - region.start
            guards.append((start, -(-start // 64) * 64 + _GUARD))
        return guards

    def offset_of(self, address: int, storage: Region) -> int:
        """Where ``address`` of this process lies in the arena; an empty storage gets a guard's address."""
        for region, offset in self._placed:
            if region.start <= storage.start and storage.end <= region.end and storage.end > storage.start:
                return offset + address - region.start
        return 0

    def copy_back(self) -> None:
        """Write every changed byte back to the caller's memory.

        Raises ToolchainError, with nothing written, where the kernel wrote outside the storages, and
        ArgumentError where it wrote to an array that is read-only.
        """
        memory = self._memory()
        for start, end in self._guards():
            if wrong := int(np.count_nonzero(memory[start:end] != _POISON)):
                first = start + int(np.argmax(memory[start:end] != _POISON))
                raise ToolchainError(
                    f"the kernel wrote {wrong} bytes outside its tensors, {self._where(first)}"
                )
        for region, offset in self._placed:
            now, before = memory[offset : offset + region.end - region.start], region.bytes()
            if np.array_equal(now, before):
                continue
            if not region.writable:
                raise ArgumentError("the kernel wrote to a numpy array that is read-only")
            before[:] = now

    def _where(self, at: int) -> str:
        below = [(region, offset) for region, offset in self._placed if offset <= at]
        if not below:
            return f"the first {_GUARD - at} bytes before the first storage"
        region, offset = below[-1]
        size = region.end - region.start
        return f"the first {at - offset - size} bytes past the end of a storage of {size} bytes"

    def _memory(self) -> npt.NDArray[np.uint8]:
        assert self._map is not None
        return np.frombuffer(self._map, np.uint8)

    def _reserve(self, size: int) -> None:
        if size <= self.size:
            return
        self.close()
        # A new name for a new size: the worker maps a path once.
        self._generation += 1
        self.path = self._folder / f"arena-{self._generation}"
        self.size = max(1 << 20, 1 << (size - 1).bit_length())
        with self.path.open("wb+") as stream:
            stream.truncate(self.size)
            self._map = mmap.mmap(stream.fileno(), self.size)

    def close(self) -> None:
        """Remove the file. Its pages go when the last mapping does."""
        self._map = None  # numpy views may still hold it; they are dropped with the frame that made them
        self.size = 0
        self.path.unlink(missing_ok=True)
