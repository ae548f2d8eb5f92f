"""CpuKernel: one op in a loaded shared object, called with named values or, faster, with addresses only."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvgen.backends.cpu import loader, machine
from kvgen.errors import ToolchainError
from kvgen.ir.plan import Arg

WITH_QUERY = ("append", "decode", "prefill")
"""Ops that export a query: are the values good, and how much workspace do they need?"""


class Described(Protocol):
    """What a kernel must say of itself: a plan does, and so does an entry of an export's manifest."""

    @property
    def op(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def args(self) -> Sequence[Arg]: ...


class CpuKernel:
    """One op, ready to run on the calling thread and ``num_threads - 1`` others."""

    def __init__(self, plan: Any, library: loader.Library) -> None:
        """``plan``: a ``Described``; typed loosely so that who holds a KernelPlan gets one back."""
        self.plan = plan
        self.library = library
        described: Described = plan
        self.fields = loader.ArgStruct([(arg.name, arg.kind) for arg in described.args])
        self._run = library.function(described.entry, self.fields)
        address = library.address(f"{described.entry}_query") if described.op in WITH_QUERY else 0
        self.addresses = self._run.address, address
        """Of the entry and of its query (0 where there is none), for callers in C."""
        # The query reads the same struct; it runs for a microsecond, so it may keep the interpreter's lock.
        self._query = _QUERY(address) if address else None
        self._names = tuple((arg.name, arg.kind == "ptr") for arg in described.args)

    def workspace(self, values: Mapping[str, Any]) -> int:
        """Bytes of workspace that a launch with these values needs."""
        if self._query is None:
            return 0
        return int(self._query(self.struct(values), -1, 0))

    def broken_rule(self, values: Mapping[str, Any], num_pages: int, rows: int) -> int:
        """The first rule of ``kvgen.ir.rules`` that lengths, row starts or page ids break; 0 for none.

        Only ids of pages that the masks let a query read are looked at.
        """
        return max(0, -int(self._query(self.struct(values), num_pages, rows))) if self._query else 0

    def launch(self, values: Mapping[str, Any]) -> None:
        """Run with values by ABI name."""
        self._run(*self._pack(values))

    def prepare(self, values: Mapping[str, Any], names: Sequence[str]) -> CpuCall:
        """A call with all values packed but those of ``names``, which every launch brings as numbers.

        A name that this kernel does not take gets a place behind its arguments.
        """
        packed = self.struct({**values, **dict.fromkeys(names, 0)})
        fields = self.fields.names
        at = tuple(fields.index(name) if name in fields else len(fields) for name in names)
        return CpuCall(packed + bytes(8), at, self._run.address, self._query)

    def struct(self, values: Mapping[str, Any]) -> bytes:
        """What a launch with these values gets a pointer to."""
        return self.fields.pack(*self._pack(values))

    def _pack(self, values: Mapping[str, Any]) -> list[Any]:
        packed = []
        for name, pointer in self._names:
            value = values.get(name)
            if name == "num_threads":
                packed.append(machine.num_threads(value))
            elif value is None:
                packed.append(0)
            elif pointer and not isinstance(value, int):
                packed.append(value.data_ptr())
            else:
                packed.append(value)
        return packed

    def resources(self) -> dict[str, Any]:
        """Size of the shared object, the flags it was built with and what it needs of a CPU."""
        sidecar = self.library.sidecar
        return {
            "bytes": self.library.path.stat().st_size,
            "requires": list(sidecar.requires),
            "object": self.library.path.name,
        }


_QUERY = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class CpuCall:
    """A kernel's arguments but for a few numbers (addresses): what a serving loop repeats.

    Threads may share it: ``bind`` makes a struct of its own for each call.
    """

    def __init__(self, packed: bytes, at: tuple[int, ...], address: int, query: Any) -> None:
        self._packed, self.at = packed, at
        self._struct = ctypes.c_int64 * (len(packed) // 8)
        self._launch, self.query = _LAUNCH(address), query
        """(struct, num_pages, rows) -> bytes of workspace, or minus the rule that values break (they are not
        looked at where num_pages is negative)."""

    def bind(self, numbers: Sequence[int]) -> Any:
        """The struct of one call: eight ``numbers`` in the order of ``names``."""
        args = self._struct.from_buffer_copy(self._packed)
        a, b, c, d, e, f, g, h = self.at  # a loop would take twice the time
        args[a], args[b], args[c], args[d], args[e], args[f], args[g], args[h] = numbers
        return args

    def launch(self, args: Any) -> None:
        """Run; the interpreter's lock is released meanwhile."""
        if status := self._launch(args):
            raise ToolchainError(f"the kernel returned {status}")
