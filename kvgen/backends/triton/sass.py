"""NVIDIA machine code (SASS), as the disassembler of the triton wheel prints it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from kvgen.backends.triton.loops import Instruction, Kind
from kvgen.errors import ToolchainError

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_ADDRESS = re.compile(r"\b0x([0-9a-f]+)\s*$")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}

_KINDS: dict[str, Kind] = {
    "LDG": "global_load", "LD": "global_load", "LDGSTS": "async_copy",
    "STG": "global_store", "ST": "global_store",
    "LDS": "shared_load", "LDSM": "shared_load", "STS": "shared_store", "STSM": "shared_store",
    "LDL": "local_load", "STL": "local_store", "UTMALDG": "tma_load", "UBLKCP": "tma_load",
    "MUFU": "mufu", "BAR": "barrier", "SYNCS": "wait", "NOP": "padding", "EXIT": "exit",
}  # fmt: skip
_MMA = re.compile(r"(?:[HIQOD]G?MMA|UTC\w*MMA)$")


def find_disassembler() -> Path:
    """``cuobjdump``: ``TRITON_CUOBJDUMP_PATH``, else the triton wheel's, else the one on PATH.

    Raises ToolchainError where there is none. Does not import triton.
    """
    if override := os.environ.get("TRITON_CUOBJDUMP_PATH"):
        return Path(override)
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        tool = Path(folder, "backends", "nvidia", "bin", "cuobjdump")
        if tool.is_file():
            return tool
    if found := shutil.which("cuobjdump"):
        return Path(found)
    raise ToolchainError("no cuobjdump: install triton, which ships it, or set TRITON_CUOBJDUMP_PATH")


def disassemble(cubin: Path) -> str:
    """The SASS text of a cubin; raises ToolchainError with the tool's message where it refuses."""
    command = [str(find_disassembler()), "-sass", str(cubin)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"cannot disassemble {cubin.name}: {error}") from None
    if done.returncode != 0 or "Function :" not in done.stdout:
        raise ToolchainError(f"cannot disassemble {cubin.name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def parse(text: str, kernel: str) -> list[Instruction]:
    """The instructions of ``kernel`` in ``cuobjdump -sass`` output; ToolchainError where it is missing."""
    code: list[Instruction] = []
    inside = False
    for line in text.splitlines():
        if header := _FUNCTION.match(line):
            inside = header[1] == kernel
        elif inside and (found := _LINE.match(line)):
            code.append(_instruction(int(found[1], 16), found[2], found[3], found[4]))
    if not code:
        raise ToolchainError(f"no code of {kernel} in the disassembly")
    return code


def _instruction(address: int, predicate: str | None, mnemonic: str, operands: str) -> Instruction:
    opcode, *modifiers = mnemonic.split(".")
    kind = _KINDS.get(opcode, "mma" if _MMA.match(opcode) else "other")
    if predicate in ("!PT", "!UPT") and kind != "padding":
        # ptxas pads with loads that are never executed: they cost an issue slot and move nothing
        kind = "other"
    if opcode == "BRA":
        target = _ADDRESS.search(operands)
        return Instruction(address, opcode, kind, opcode, branch_to=int(target[1], 16) if target else None)
    if kind not in ("global_load", "async_copy", "global_store", "shared_load", "shared_store"):
        return Instruction(address, opcode, kind, opcode)
    if opcode in ("LDSM", "STSM"):
        # matrix moves, e.g. LDSM.16.MT88.4: the shape (T = transposed), then how many matrices
        shape = next((i for i, m in enumerate(modifiers) if m.startswith("M")), 0)
        name = ".".join([opcode, *modifiers[shape:]])
        return Instruction(
            address, opcode, kind, name, 32 * int(modifiers[-1] if modifiers[-1].isdigit() else 1)
        )
    width = next((m for m in modifiers if m in _WIDTHS), "32")
    return Instruction(address, opcode, kind, f"{opcode}.{width}", _WIDTHS.get(width, 32))
