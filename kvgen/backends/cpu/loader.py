"""Load built libraries through ctypes, and call their kernels.

ABI of every kernel: ``extern "C" int name(const void* args)``; ``args`` points to 8-byte fields in a fixed
order (int64, pointer, double), the result is 0 or an error code. One argument keeps the call at about a
microsecond whatever the number of fields, and the same struct serves C callers.

The OpenMP runtime comes from the ``openmp`` module, which also says how threads and ``fork`` behave.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvgen.backends.cpu import artifact, openmp
from kvgen.backends.cpu.isa import check_runnable
from kvgen.errors import ArgumentError, ToolchainError

FIELD_CODES: Mapping[str, str] = MappingProxyType({"i64": "q", "ptr": "Q", "f64": "d"})
"""Kinds of argument fields and their codes in ``struct``."""


class ArgStruct:
    """The layout of one kernel's ``args``: names and kinds of its 8-byte fields, in order."""

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        """Args:
            fields: (name, kind) pairs; kinds are ``i64``, ``ptr``, ``f64``.

        Raises:
            ArgumentError: an unknown kind or a name used twice.
        """
        self.names = tuple(name for name, _ in fields)
        if len(set(self.names)) != len(self.names):
            raise ArgumentError(f"fields: a name occurs twice in {self.names}")
        if wrong := [(name, kind) for name, kind in fields if kind not in FIELD_CODES]:
            raise ArgumentError(f"fields: {wrong!r}: kinds are {', '.join(FIELD_CODES)}")
        self.kinds = tuple(kind for _, kind in fields)
        self._struct = struct.Struct("=" + "".join(FIELD_CODES[kind] for kind in self.kinds))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed struct."""
        return self._struct.size

    def pack(self, *values: float) -> bytes:
        """The packed struct: whole numbers for ``i64`` and ``ptr`` (an address), any number for ``f64``.

        Raises:
            ArgumentError: wrong count, wrong type or out of range; the message names the field.
        """
        try:
            return self._struct.pack(*values)
        except (struct.error, TypeError, OverflowError) as error:
            raise self._explain(values, error) from error

    def _explain(self, values: Sequence[object], error: Exception) -> ArgumentError:
        """Find the field that ``struct`` refused (it does not say which)."""
        if len(values) != len(self.names):
            return ArgumentError(
                f"{len(values)} arguments for {len(self.names)} fields: {', '.join(self.names)}"
            )
        for name, kind, value in zip(self.names, self.kinds, values, strict=True):
            try:
                struct.pack("=" + FIELD_CODES[kind], value)
            except (struct.error, TypeError, OverflowError) as reason:
                return ArgumentError(f"{name} = {value!r}: not a valid {kind} ({reason})")
        return ArgumentError(str(error))

    def c_declaration(self, name: str = "Args") -> str:
        """The same struct in C++, for the kernel's source."""
        types = {"i64": "int64_t", "ptr": "void*", "f64": "double"}
        body = "".join(
            f"  {types[kind]} {field};\n" for field, kind in zip(self.names, self.kinds, strict=True)
        )
        return f"struct {name} {{\n{body}}};\nstatic_assert(sizeof({name}) == {self.nbytes});\n"


class Function:
    """A kernel of a loaded library."""

    def __init__(
        self, library: Library, name: str, address: int, fields: ArgStruct, statuses: Mapping[int, str]
    ) -> None:
        self.library = library  # keeps the handle, and with it the code, alive
        self.name = name
        self.address = address
        self.fields = fields
        self.statuses = dict(statuses)
        # c_char_p hands over the bytes object's own buffer: no copy, and no shared scratch between threads.
        # It is 16-byte aligned (malloc alignment) plus the bytes header, a multiple of 8, so 8-byte fields
        # are aligned.
        self._raw = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(address)

    def __call__(self, *values: float) -> None:
        """Pack the values and run the kernel; the GIL is released meanwhile.

        Raises:
            ArgumentError: the values do not fit the fields.
            ToolchainError: the kernel returned an error code.
        """
        if status := self._raw(self.fields.pack(*values)):
            raise ToolchainError(
                f"{self.name} returned {status} ({self.statuses.get(status, 'unnamed status')})"
            )

    def raw(self, args: bytes) -> int:
        """Run the kernel on an already packed struct; returns its status, which the caller must look at.

        Raises:
            ArgumentError: ``args`` has another size than the fields.
        """
        if len(args) != self.fields.nbytes:
            raise ArgumentError(f"args: {len(args)} bytes, and {self.name} takes {self.fields.nbytes}")
        return int(self._raw(args))


class Library:
    """A shared object in this process. Made by ``load``, once per file, and kept until the process ends."""

    def __init__(self, path: Path, sidecar: artifact.Sidecar, handle: ctypes.CDLL) -> None:
        self.path = path
        self.sidecar = sidecar
        self._handle = handle

    def address(self, name: str) -> int:
        """Address of an exported symbol.

        Raises:
            ToolchainError: the library has no such symbol.
        """
        try:
            symbol = getattr(self._handle, name)
        except AttributeError:
            raise ToolchainError(
                f'{self.path}: no symbol {name!r}; is it extern "C" and not static in {self.path.stem}.cpp?'
            ) from None
        return ctypes.cast(symbol, ctypes.c_void_p).value or 0

    def function(
        self,
        name: str,
        fields: ArgStruct | Sequence[tuple[str, str]],
        statuses: Mapping[int, str] | None = None,
    ) -> Function:
        """The kernel ``name`` with the given argument fields.

        Args:
            fields: an ``ArgStruct``, or its (name, kind) pairs.
            statuses: meaning of the error codes, for messages.

        Raises:
            ToolchainError: the library has no such symbol.
        """
        layout = fields if isinstance(fields, ArgStruct) else ArgStruct(fields)
        return Function(self, name, self.address(name), layout, statuses or {})


_lock = threading.Lock()
_loaded: dict[Path, Library] = {}


def load(path: Path | str) -> Library:
    """Open a library built by ``toolchain``, after checking that it is whole and that this CPU can run it.

    The same file gives the same ``Library``. Libraries are never closed: a kernel's address may be held
    anywhere, and OpenMP's threads may still stand in its code.

    Raises:
        ToolchainError: missing, truncated, foreign, or a sanitised build without the sanitizer runtimes.
        UnsupportedError: it needs instructions that this CPU lacks, or was built for another architecture.
    """
    library = Path(path).resolve()
    with _lock:
        if found := _loaded.get(library):
            return found
    return open_library(library, artifact.verify(library))


def open_library(path: Path, sidecar: artifact.Sidecar) -> Library:
    """Open a library whose content was verified against ``sidecar``; otherwise as ``load``."""
    library = path.resolve()
    with _lock:
        if found := _loaded.get(library):
            return found
        check_runnable(sidecar.requires, what=str(library), arch=sidecar.arch)
        if sidecar.sanitize and not _has_sanitizer():
            raise ToolchainError(
                f"{library}: a sanitised build; its runtime ends the process unless it was preloaded: "
                "use tests/support/sanitize.py, or set LD_PRELOAD to compiler.sanitizer_libraries()"
            )
        linked = "-fopenmp" in sidecar.link_flags
        if not linked:
            openmp.provide()
        try:
            handle = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise ToolchainError(f"{library}: the dynamic linker refused it: {error}") from error
        openmp.warn_if_several(linked)
        result = _loaded[library] = Library(library, sidecar, handle)
        return result


def _has_sanitizer() -> bool:
    """Whether the address sanitizer's runtime is in this process."""
    return hasattr(ctypes.CDLL(None), "__asan_init")
