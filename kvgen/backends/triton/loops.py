"""The loops of a kernel's machine code and what one pass through each costs.

A kernel's speed limit can be read without running it: instructions of the main loop against the issue
slots that exist while memory delivers the loop's bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "mma", "mufu", "global_load", "async_copy", "tma_load", "global_store", "shared_load", "shared_store",
    "local_load", "local_store", "barrier", "wait", "padding", "exit", "other",
]  # fmt: skip
"""What an instruction is for. ``async_copy`` is a global load that goes to shared memory by itself;
``wait`` polls a barrier; ``padding`` does nothing and is never counted."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction, classified."""

    address: int
    """Byte offset in the kernel (NVIDIA) or index of the instruction (AMD)."""
    opcode: str
    """Base name, e.g. ``LDG``, ``v_mfma_f32_16x16x16_bf16``."""
    kind: Kind
    name: str
    """Name with its width where it moves memory, e.g. ``LDGSTS.128``; else the base name."""
    bits: int = 0
    """Bits a thread moves; 0 where it moves none or the width is not the thread's (TMA)."""
    branch_to: int | None = None
    """Address this instruction may jump to."""


@dataclass(frozen=True)
class Loop:
    """One loop: counts are static instructions a thread issues in one pass, branches all taken.

    They include predicated instructions and exclude NOPs. Mappings go from an instruction's name with
    its width to its count, e.g. ``{"LDGSTS.128": 16, "LDG.32": 2}``.
    """

    start: int
    end: int
    """Addresses of the first instruction and of the branch back."""
    innermost: bool
    """Whether it contains no other loop (loops that only wait for a barrier do not count)."""
    instructions: int
    mma: Mapping[str, int]
    """Matrix instructions (HMMA, HGMMA, IMMA, UTC*MMA; v_mfma_*)."""
    mufu: int
    """Transcendental instructions (exp2, reciprocal, ...)."""
    global_loads: Mapping[str, int]
    """Loads from global memory by width, asynchronous copies included."""
    async_copies: int
    """Those of ``global_loads`` that go to shared memory without a register, and TMA loads."""
    tma_loads: int
    """UTMALDG (a box of a tensor, one instruction a block)."""
    global_stores: Mapping[str, int]
    shared_loads: Mapping[str, int]
    shared_stores: Mapping[str, int]
    local_loads: int
    """Spill reloads inside the loop: they cost time, unlike a stack used outside it."""
    local_stores: int
    barriers: int
    """Block-wide barriers."""
    load_bits: int
    """Bits a thread loads from global memory in one pass (TMA excluded)."""
    narrow_loads: Mapping[str, int]
    """Those of ``global_loads`` below 32 bits: one- and two-byte loads."""
    opcodes: Mapping[str, int]
    """Every instruction by base name."""


def instr_per_token(loop: Loop, warps: int, tokens: int) -> float:
    """Warp-instructions one KV token costs: ``warps`` warps each pass the loop for ``tokens`` tokens."""
    return loop.instructions * warps / tokens


def find_loops(code: Sequence[Instruction]) -> tuple[Loop, ...]:
    """The loops of one kernel in address order.

    A backward branch makes a loop of the addresses between, with two exceptions learnt from real code:
    a range that holds the kernel's exit is out-of-line code that jumps back (TMA waits, slow paths),
    and a branch to itself is what follows the exit. Branches to one start are one loop.
    """
    index_of = {instruction.address: index for index, instruction in enumerate(code)}
    spans: dict[int, int] = {}
    for last, instruction in enumerate(code):
        first = index_of.get(instruction.branch_to) if instruction.branch_to is not None else None
        if first is None or first >= last or any(i.kind == "exit" for i in code[first : last + 1]):
            continue
        spans[first] = max(last, spans.get(first, last))
    bodies = {span: code[span[0] : span[1] + 1] for span in spans.items()}
    working = {span: body for span, body in bodies.items() if not _only_waits(body)}

    def contains(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
        return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]

    return tuple(
        _loop(body, innermost=not any(contains(span, other) for other in working))
        for span, body in sorted(working.items())
    )


def _only_waits(body: Sequence[Instruction]) -> bool:
    idle = ("wait", "padding", "other")
    return any(i.kind == "wait" for i in body) and all(i.kind in idle for i in body) and len(body) <= 16


def _loop(body: Sequence[Instruction], *, innermost: bool) -> Loop:
    live = [i for i in body if i.kind != "padding"]
    kinds = Counter(i.kind for i in live)

    def names(*wanted: Kind) -> dict[str, int]:
        return dict(sorted(Counter(i.name for i in live if i.kind in wanted).items()))

    loads = [i for i in live if i.kind in ("global_load", "async_copy")]
    return Loop(
        start=body[0].address,
        end=body[-1].address,
        innermost=innermost,
        instructions=len(live),
        mma=names("mma"),
        mufu=kinds["mufu"],
        global_loads=names("global_load", "async_copy"),
        async_copies=kinds["async_copy"] + kinds["tma_load"],
        tma_loads=kinds["tma_load"],
        global_stores=names("global_store"),
        shared_loads=names("shared_load"),
        shared_stores=names("shared_store"),
        local_loads=kinds["local_load"],
        local_stores=kinds["local_store"],
        barriers=kinds["barrier"],
        load_bits=sum(i.bits for i in loads),
        narrow_loads=dict(sorted(Counter(i.name for i in loads if i.bits < 32).items())),
        opcodes=dict(sorted(Counter(i.opcode for i in live).items())),
    )
