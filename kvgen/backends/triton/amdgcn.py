"""AMD machine code: the kernel's facts from the hsaco's metadata note, its instructions from amdgcn text."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from kvgen.backends.triton.elf import Elf, Parameter
from kvgen.backends.triton.loops import Instruction, Kind
from kvgen.errors import ToolchainError

_METADATA_NOTE = 32  # NT_AMDGPU_METADATA: a msgpack map, documented in LLVM's AMDGPU usage guide


@dataclass(frozen=True)
class HsacoFacts:
    """What an hsaco says about one of its kernels."""

    registers: int
    """VGPRs a thread, AGPRs included (gfx942 has one file for both)."""
    accumulators: int
    """AGPRs a thread."""
    scalar_registers: int
    """SGPRs a wavefront."""
    spilled_registers: int
    """VGPRs that were spilled. SGPRs "spill" into lanes of a vector register, not to memory: not counted."""
    frame_bytes: int
    """Scratch memory of a thread in bytes."""
    parameters: tuple[Parameter, ...]
    code: bytes


def hsaco_facts(data: bytes, kernel: str) -> HsacoFacts:
    """Read the facts of ``kernel``; raises ToolchainError where they are missing or damaged."""
    elf = Elf(data)
    try:
        metadata = _metadata(elf.section(".note").data)
        for entry in metadata["amdhsa.kernels"]:
            if entry[".name"] == kernel:
                return HsacoFacts(
                    registers=entry[".vgpr_count"],
                    accumulators=entry.get(".agpr_count", 0),
                    scalar_registers=entry[".sgpr_count"],
                    spilled_registers=entry[".vgpr_spill_count"],
                    frame_bytes=entry[".private_segment_fixed_size"],
                    parameters=tuple(Parameter(a[".offset"], a[".size"]) for a in entry[".args"]),
                    code=elf.section(".text").data,
                )
    except (struct.error, IndexError, KeyError, TypeError, ValueError) as error:
        raise ToolchainError(f"damaged metadata of an hsaco: {error!r}") from None
    raise ToolchainError(f"the hsaco has no kernel {kernel}")


def _metadata(notes: bytes) -> Any:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        start = at + 12 + (name_size + 3) // 4 * 4
        if kind == _METADATA_NOTE and notes[at + 12 : at + 12 + name_size] == b"AMDGPU\0":
            return _unpack(notes[start : start + size], 0)[0]
        at = start + (size + 3) // 4 * 4
    raise ValueError("no AMDGPU note")


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """Read one msgpack value at ``at``; returns it and where the next starts. Only the kinds LLVM writes."""
    tag = data[at]
    at += 1
    if tag <= 0x7F:
        return tag, at
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag <= 0x8F:
        return _map(data, at, tag & 0x0F)
    if tag <= 0x9F:
        return _array(data, at, tag & 0x0F)
    if tag <= 0xBF:
        return _text(data, at, tag & 0x1F)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    forms = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
             0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}  # fmt: skip
    if tag not in forms:
        raise ValueError(f"msgpack tag {tag:#x}")
    (value,) = struct.unpack_from(forms[tag], data, at)
    at += struct.calcsize(forms[tag])
    if tag <= 0xD3:
        return value, at
    return (_text if tag <= 0xDB else _array if tag <= 0xDD else _map)(data, at, value)


def _text(data: bytes, at: int, length: int) -> tuple[str, int]:
    return data[at : at + length].decode(), at + length


def _array(data: bytes, at: int, length: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(length):
        value, at = _unpack(data, at)
        values.append(value)
    return values, at


def _map(data: bytes, at: int, length: int) -> tuple[dict[Any, Any], int]:
    pairs = {}
    for _ in range(length):
        key, at = _unpack(data, at)
        pairs[key], at = _unpack(data, at)
    return pairs, at


_LABEL = re.compile(r"^(\.L\w+):")
_LINE = re.compile(r"^\t([a-z]\w+)[ \t]*([^;]*)")
_MUFU = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)(_iflag|_legacy)?_(f16|f32|f64|bf16)")
_MEMORY = re.compile(r"(global|flat|buffer|scratch)_(load|store)_|ds_(read|write|load|store)")
_BITS = (("dwordx4", 128), ("dwordx3", 96), ("dwordx2", 64), ("dword", 32), ("short", 16), ("byte", 8),
         ("b128", 128), ("b96", 96), ("b64", 64), ("b32", 32), ("b16", 16), ("16", 16), ("b8", 8),
         ("8", 8))  # fmt: skip


def parse(text: str, kernel: str) -> list[Instruction]:
    """The instructions of ``kernel`` in amdgcn text; raises ToolchainError where it is missing."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"{kernel}:"):
            break
    labels: dict[str, int] = {}
    rows: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith(".Lfunc_end"):
            break
        if label := _LABEL.match(line):
            labels[label[1]] = len(rows)
        elif found := _LINE.match(line):
            rows.append((found[1], found[2].strip()))
    if not rows:
        raise ToolchainError(f"no code of {kernel} in the amdgcn text")
    return [_instruction(i, opcode, operands, labels) for i, (opcode, operands) in enumerate(rows)]


def _instruction(index: int, opcode: str, operands: str, labels: dict[str, int]) -> Instruction:
    if opcode == "s_branch" or opcode.startswith("s_cbranch_"):
        return Instruction(index, opcode, "other", opcode, branch_to=labels.get(operands))
    kind, bits = _classify(opcode, operands)
    return Instruction(index, opcode, kind, opcode, bits)


def _classify(opcode: str, operands: str) -> tuple[Kind, int]:
    if opcode.startswith(("v_mfma_", "v_smfmac_", "v_wmma_")):
        return "mma", 0
    if _MUFU.match(opcode):
        return "mufu", 0
    if opcode in ("s_nop", "s_code_end"):
        return "padding", 0
    if opcode == "s_endpgm":
        return "exit", 0
    if opcode == "s_barrier":
        return "barrier", 0
    memory = _MEMORY.match(opcode)
    if memory is None:
        return "other", 0
    bits = next((bits for word, bits in _BITS if word in opcode), 32)
    if memory[3]:
        pair = 2 if re.match(r"ds_\w+?2(st64)?_b", opcode) else 1
        return ("shared_load" if memory[3] in ("read", "load") else "shared_store"), bits * pair
    load = memory[2] == "load"
    if memory[1] == "scratch":
        return ("local_load" if load else "local_store"), bits
    if load and ("_lds_" in opcode or operands.endswith(" lds")):
        return "async_copy", bits
    return ("global_load" if load else "global_store"), bits
