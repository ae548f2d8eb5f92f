"""inspect: what the binary of a kernel must not show. Judged from machine code; no device is needed.

Peers' real faults were found this way: an unaligned four-byte scale beside a row turned every load of an
int8 cache into one-byte loads (users measured 6.3 times), and a tile one size too large spilled inside
the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.errors import ToolchainError
from kvgen.ir import Spec


def reads_bytes(spec: Spec) -> bool:
    """Whether kernels read masks that the caller brings byte by byte."""
    return any(param.dtype in ("bool", "bits") for param in spec.attention.params)


def faults(op: str, resources: Mapping[str, Any], spec: Spec | None = None) -> tuple[str, ...]:
    """Reasons to reject the kernels of ``op``, read from ``Kernel.resources()`` of a GPU target.

    Any op: registers kept in memory. ``decode`` and ``prefill``: loads of one or two bytes in the loop
    over keys, unless the ``spec`` given has masks that are read so. Empty where there is nothing to object
    to (also for CPU kernels, which report neither).
    """
    found = []
    for name, facts in resources.items():
        if not isinstance(facts, Mapping):
            continue
        spilled = int(facts["spill_bytes"]) + 4 * int(facts["spilled_registers"])
        if spilled:
            found.append(f"{name} keeps {spilled} bytes of its registers in memory")
        narrow = facts.get("loop", {}).get("narrow_loads")
        if narrow and op in ("decode", "prefill") and not (spec and reads_bytes(spec)):
            widths = ", ".join(f"{count} x {width}" for width, count in narrow.items())
            found.append(f"{name} loads one or two bytes at a time in its loop: {widths}")
    return tuple(found)


def verify_binary(op: str, target: str, resources: Mapping[str, Any], spec: Spec | None = None) -> None:
    """Raise ``ToolchainError`` naming every fault of a compiled op."""
    if found := faults(op, resources, spec):
        raise ToolchainError(f"{op} for {target}: {'; '.join(found)}; choose a smaller tile or more warps")
