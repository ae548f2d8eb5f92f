"""Encoding rows: how an append on the CPU makes codes, scales and minima of f32 numbers, whatever the codec.

Formats with writers of their own (``Spec.direct``) are ``cpu_codec``'s. ``cpp/_encode.jinja`` prints the
others from these answers; the bytes are the oracle's (``kvgen.reference.blocks``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, log2

from kvgen.ir import QuantSpec, Segment, Spec
from kvgen.passes.address import Address
from kvgen.passes.cpu_values import ValuePart, value_part, whole_of

STORE = {
    "f32": "limit_f32(%s)",
    "bf16": "limit_bf16(%s)",
    "f16": "limit_f16(%s)",
    "e4m3": "f32_to_small<4, 3, 7, 0x43e00000, 0x7f>(%s)",
}
"""C++ text of a scale of each type as it is stored: rounded to nearest even, saturated."""

NAN = {"f32": "NAN", "bf16": "0x7fc0", "f16": "0x7e00", "e4m3": "0x7f", "e8m0": "255"}
"""The NaN of each type of scale."""


@dataclass(frozen=True)
class EncodePart:
    """A segment of a row as it is written."""

    values: ValuePart
    """Its planes and addresses, as they are read."""
    scaled: bool
    static: bool
    affine: bool
    rms: bool
    span: int
    """Tokens that share a scale."""
    block: int
    """Elements of d that do."""
    code: str
    """C++ text of the code of %s, a number divided by its scale."""
    zero: int
    """The code of a block of zeros."""
    bounds: tuple[float, ...]
    """Middles of the levels of a table."""
    steps: str
    """C++ text of what a block's measure is divided by."""
    store: str
    """C++ text of a stored scale, with %s for the scale."""
    nan: str
    power: int | None
    """Exponent of the codec's largest number where scales are powers of two, else None."""
    narrow: str
    """Storage type of a plain format."""

    @property
    def levels_name(self) -> str:
        """Name of the constant that holds ``bounds``."""
        return f"{self.values.plane.upper()}_BOUNDS"

    @property
    def helpers(self) -> set[str]:
        """Macros of ``cpp/_encode.jinja`` and ``cpp/_values.jinja`` that it needs."""
        if not self.scaled:
            return set()
        texts = [self.code, self.store]
        texts += [s.load for s in (self.values.scale, self.values.low) if s]
        names = (
            "to_signed",
            "to_unsigned",
            "f32_to_small",
            "nearest_level",
            "limit_f32",
            "limit_bf16",
            "limit_f16",
        )
        found = {name for name in (*names, "small_to_f32", "e8m0_to_f32") if any(name in t for t in texts)}
        return found if self.static else found | {"amax_bits"}


def encode_parts(spec: Spec, addresses: Mapping[str, Address], side: str) -> tuple[EncodePart, ...]:
    """How rows of ``k`` or ``v`` are written, segment by segment."""
    whole = whole_of(spec, side)
    return tuple(_part(part, addresses, whole) for part in spec.segments(side))


def _part(part: Segment, addresses: Mapping[str, Address], whole: str) -> EncodePart:
    quant, fmt = part.quant, part.quant.fmt
    values = value_part(part, addresses, whole)
    dtype = quant.scale_dtype
    edges: tuple[float, ...] = ()
    if fmt.kind == "table":
        edges = tuple(
            _f32((_f32(a) + _f32(b)) * 0.5) for a, b in zip(fmt.levels, fmt.levels[1:], strict=False)
        )
    return EncodePart(
        values=values,
        scaled=fmt.scaled,
        static=quant.static_scale,
        affine=quant.affine,
        rms=fmt.measure == "rms",
        span=max(1, quant.tok_block),
        block=quant.d_block or part.size,
        code=_code(quant, f"{part.plane.upper()}_BOUNDS") if fmt.scaled else "",
        zero=_zero(quant, edges) if fmt.scaled else 0,
        bounds=edges,
        steps=_float(quant.steps) if fmt.scaled else "",
        store=STORE.get(dtype, "") if not quant.static_scale else "",
        nan=NAN[dtype],
        power=floor(log2(fmt.qmax or 1)) if fmt.scaled and dtype == "e8m0" else None,
        narrow="" if fmt.scaled else fmt.name,
    )


def _code(quant: QuantSpec, bounds: str) -> str:
    """C++ text of a code as an unsigned bit field."""
    fmt, mask = quant.fmt, (1 << quant.fmt.bits) - 1
    if fmt.kind == "float":
        (largest,) = struct.unpack("<I", struct.pack("<f", fmt.qmax or 0.0))
        nan = fmt.nan_code or 0
        return f"f32_to_small<{fmt.exponent}, {fmt.mantissa}, {fmt.bias}, {largest:#x}, {nan:#x}>(%s)"
    if fmt.kind == "table":
        return f"nearest_level<{len(fmt.levels) - 1}>(%s, {bounds})"
    if quant.affine:
        return f"to_unsigned<{mask}>(%s)"
    if fmt.offset:
        return f"to_signed<{fmt.qmax}>(%s) + {1 << (fmt.bits - 1)}"
    return f"to_signed<{fmt.qmax}>(%s)" if fmt.bits == 8 else f"to_signed<{fmt.qmax}>(%s) & {mask}"


def _zero(quant: QuantSpec, bounds: tuple[float, ...]) -> int:
    fmt = quant.fmt
    if quant.affine or fmt.kind == "float":
        return 0
    if fmt.kind == "table":
        return sum(bound < 0.0 for bound in bounds)
    return 1 << (fmt.bits - 1) if fmt.offset else 0


def _f32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def _float(x: float) -> str:
    return f"{float(x)!r}f"
