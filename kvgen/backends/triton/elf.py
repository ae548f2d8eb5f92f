"""A small reader of the ELF files that GPU compilers write: sections, symbols, NVIDIA's kernel facts.

Only little-endian ELF64, which is what cubin and hsaco are. The layout of ``.nv.info`` is not
documented by NVIDIA; the attribute numbers are the ones ``cuobjdump -elf`` prints by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kvgen.errors import ToolchainError

_FRAME_SIZE = 0x11
_PARAMETER = 0x17
_REGISTER_COUNT = 0x2F
_NO_BITS = 8  # a section that occupies no bytes of the file


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter as the driver sees it."""

    offset: int
    """Bytes from the start of the parameter block."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class CubinFacts:
    """What a cubin says about one of its kernels."""

    registers: int
    """Registers a thread."""
    frame_bytes: int
    """Stack frame of a thread in bytes: spills and local arrays."""
    parameters: tuple[Parameter, ...]
    """In order, the scratch pointers that Triton appends included."""
    code: bytes
    """The machine code."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes
    link: int
    info: int


class Elf:
    """The sections of one file. Raises ToolchainError where the bytes are not a whole ELF64 file."""

    def __init__(self, data: bytes) -> None:
        try:
            self.sections = self._read(data)
        except (struct.error, IndexError, ValueError) as error:
            raise ToolchainError(f"damaged ELF file: {error}") from None

    @staticmethod
    def _read(data: bytes) -> list[_Section]:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"it starts with {data[:6]!r}, not with the mark of a little-endian ELF64 file")
        (table,) = struct.unpack_from("<Q", data, 0x28)
        entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
        rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]
        contents = []
        for row in rows:
            kind, offset, size = row[1], row[4], row[5]
            if kind != _NO_BITS and offset + size > len(data):
                raise ValueError(f"a section ends at byte {offset + size} of {len(data)}")
            contents.append(b"" if kind == _NO_BITS else data[offset : offset + size])
        names = contents[names_index]
        return [
            _Section(_string(names, row[0]), row[1], content, row[6], row[7])
            for row, content in zip(rows, contents, strict=True)
        ]

    def section(self, name: str) -> _Section:
        """The section called ``name``; raises ToolchainError where there is none."""
        for section in self.sections:
            if section.name == name:
                return section
        raise ToolchainError(f"the ELF file has no section {name}")

    def symbol_index(self, name: str) -> int:
        """Index of symbol ``name`` in ``.symtab``; raises ToolchainError where there is none."""
        table = self.section(".symtab")
        names = self.sections[table.link].data
        for index, entry in enumerate(struct.iter_unpack("<IBBHQQ", table.data)):
            if _string(names, entry[0]) == name:
                return index
        raise ToolchainError(f"the ELF file has no symbol {name}")


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of an ``.nv.info`` section: a byte of format, one of attribute, 16 bits."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:  # the 16 bits are the length of a payload that follows
            yield attribute, data[at : at + value]
            at += value
        else:
            yield attribute, struct.pack("<H", value)


def cubin_facts(data: bytes, kernel: str) -> CubinFacts:
    """Registers, frame, parameters and code of ``kernel``; raises ToolchainError where they are missing."""
    elf = Elf(data)
    symbol = elf.symbol_index(kernel)
    counts: dict[int, int] = {}
    for attribute, payload in _attributes(elf.section(".nv.info").data):
        if attribute in (_REGISTER_COUNT, _FRAME_SIZE):
            index, value = struct.unpack("<II", payload)
            if index == symbol:
                counts[attribute] = value
    if counts.keys() != {_REGISTER_COUNT, _FRAME_SIZE}:
        raise ToolchainError(f"the cubin does not tell the registers and the frame of {kernel}")
    parameters: dict[int, Parameter] = {}
    for attribute, payload in _attributes(elf.section(f".nv.info.{kernel}").data):
        if attribute == _PARAMETER:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            parameters[ordinal] = Parameter(offset, packed >> 18)
    return CubinFacts(
        counts[_REGISTER_COUNT],
        counts[_FRAME_SIZE],
        tuple(parameters[i] for i in sorted(parameters)),
        elf.section(f".text.{kernel}").data,
    )
