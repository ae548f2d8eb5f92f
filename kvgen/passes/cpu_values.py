"""Value rows: how the CPU turns a stored row of K or V into f32 numbers, whatever its codec.

Formats with operands of their own are read by the kernels themselves (``Spec.direct``). All others are read
through the functions that ``cpp/_values.jinja`` makes of these answers: ``read_k`` and ``read_v``, one row at
a time, and ``read_raw_k`` and ``read_raw_v`` for tokens that are left unquantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.ir import QuantSpec, Segment, Spec, Target
from kvgen.ir.codec import Codec, float_value
from kvgen.passes.address import Address
from kvgen.passes.cpu_text import C_TYPES

SPECIAL = {"none": 0, "nan": 1, "ieee": 2}
"""How ``small_to_f32`` numbers the codes of a small float that are no numbers."""


@dataclass(frozen=True)
class ValuePlane:
    """One plane of codes."""

    name: str
    type: str
    address: Address
    """Of a stored element."""
    elements: int
    """Stored elements of a row."""
    bits: int
    packed: int

    @property
    def places(self) -> range:
        """The codes of a stored element, from its low bits upwards (templates know another ``range``)."""
        return range(self.packed)


@dataclass(frozen=True)
class ValueScale:
    """A scale or a minimum."""

    name: str
    type: str
    address: Address
    load: str
    """C++ text of an f32, with %s for the stored element."""
    half: bool
    """Whether it is stored as f16."""


@dataclass(frozen=True)
class ValuePart:
    """A segment of a row."""

    plane: str
    start: int
    size: int
    count: str
    """Its elements in C++: the constant for a whole row's, else a number."""
    planes: tuple[ValuePlane, ...]
    number: str
    """C++ text of the number of a code, with %s for the code; empty where it is looked up."""
    levels: tuple[float, ...]
    """What the codes stand for, where they are looked up: sixteen numbers."""
    scale: ValueScale | None
    low: ValueScale | None
    outer: Address | None
    block: int
    """Elements that share a scale; 0 where all of the row do."""

    @property
    def unpacked(self) -> bool:
        """Whether codes are taken from their bytes first."""
        return self.planes[0].packed > 1 or bool(self.levels)

    @property
    def blocks(self) -> str:
        """How many scales a row has where it has several, in C++."""
        return self.count if self.block == 1 else str(self.size // max(1, self.block))

    def halves(self, scale: ValueScale) -> bool:
        """Whether ``scale`` is a row of f16 numbers side by side, which vectors widen at once."""
        return self.block == 1 and scale.half and scale.address.stride("d") == 1


@dataclass(frozen=True)
class ValueRow:
    """A row of K or V."""

    side: str
    width: int
    parts: tuple[ValuePart, ...]
    raw: Address | None
    """Of an element of a raw row, where some tokens are kept."""
    raw_dtype: str
    raw_type: str
    raw_load: str
    """C++ text of an f32, with %s for an element of a raw row."""
    norm: float
    """Factor of the transform that rotated it; 0 where none did."""
    mean: bool
    """Whether a mean was subtracted."""

    @property
    def size(self) -> str:
        """Name of the constant that counts its elements."""
        return "HEAD_DIM" if self.side == "k" else "V_HEAD_DIM"

    @property
    def code_planes(self) -> tuple[ValuePlane, ...]:
        """Planes of codes of all its parts."""
        return tuple(plane for part in self.parts for plane in part.planes)

    @property
    def helpers(self) -> tuple[str, ...]:
        """Macros of ``cpp/_values.jinja`` and of the ISA row that it needs."""
        text = " ".join(
            [self.raw_load, *(p.number for p in self.parts)]
            + [s.load for p in self.parts for s in (p.scale, p.low) if s]
        )
        found = [name for name in ("small_to_f32", "e8m0_to_f32") if name in text]
        found += ["look_up"] if any(part.levels for part in self.parts) else []
        found += ["widen_half"] if self.widens else []
        found += ["hadamard"] if self.norm else []
        return (*found, "closed_end") if self.raw else tuple(found)

    @property
    def writers(self) -> tuple[str, ...]:
        """Macros that writing it needs, beside those of its codes."""
        found = ["hadamard"] if self.norm else []
        found += ["closed_end"] if self.raw else []
        found += ["small_to_f32", "widen_half"] if self.raw and self.raw_dtype == "f16" else []
        return tuple(found)

    @property
    def widens(self) -> bool:
        """Whether rows of f16 numbers are read: raw rows, or scales of each element."""
        scales = [(p, s) for p in self.parts for s in (p.scale, p.low) if s]
        return bool(self.raw and self.raw_dtype == "f16") or any(p.halves(s) for p, s in scales)

    @property
    def scalars(self) -> set[str]:
        """Helpers that every kernel can name: conversions of one number."""
        texts = [self.raw_load] + [p.number for p in self.parts]
        texts += [s.load for p in self.parts for s in (p.scale, p.low) if s]
        return {"bf16_to_f32"} if any("bf16_to_f32" in text for text in texts) else set()


def value_row(spec: Spec, addresses: Mapping[str, Address], side: str) -> ValueRow:
    """How rows of ``k`` or ``v`` are read; those of a V inside K are the start of K's."""
    att, raw = spec.attention, spec.cache.raw
    name = "k" if spec.cache.alias else side
    return ValueRow(
        side=side,
        width=att.head_dim if side == "k" else att.v_head_dim,
        parts=tuple(value_part(part, addresses, whole_of(spec, side)) for part in spec.segments(side)),
        raw=addresses[f"{name}_raw"] if raw else None,
        raw_dtype=att.q_dtype,
        raw_type=C_TYPES[att.q_dtype],
        raw_load=_load(att.q_dtype) if raw else "",
        norm=norm_of(spec, side),
        mean=spec.cache.quant(side).mean,
    )


def whole_of(spec: Spec, side: str) -> str:
    """Name of the constant that counts the elements of a row's only segment; empty where it has several."""
    return ("HEAD_DIM" if side == "k" else "V_HEAD_DIM") if len(spec.segments(side)) == 1 else ""


def norm_of(spec: Spec, side: str) -> float:
    """The factor that makes the Walsh-Hadamard transform of a row orthonormal; 0 where none is made."""
    width = spec.attention.head_dim if side == "k" else spec.attention.v_head_dim
    return width**-0.5 if spec.cache.quant(side).transform else 0.0


def value_answers(rows: tuple[ValueRow, ...], target: Target) -> dict[str, Any]:
    """What the macros of ``cpp/_values.jinja`` ask, whatever the op."""
    names = dict.fromkeys(name for row in rows for name in row.helpers)
    return {
        "value_rows": {row.side: row for row in rows},
        "value_helpers": tuple(names),
        "value_isa": f"cpp/_isa_values_{target.arch}.jinja",
    }


def value_part(part: Segment, addresses: Mapping[str, Address], whole: str = "") -> ValuePart:
    """One segment of a row, as it is read; ``whole``: the name of its size where it is all of a row."""
    quant = part.quant
    planes = tuple(
        ValuePlane(name, C_TYPES[p.storage], addresses[name], part.size // p.packed, p.bits, p.packed)
        for name, p in part.codes
    )
    scale = low = outer = None
    if quant.fmt.scaled:
        dtype = "f32" if quant.static_scale else quant.scale_dtype
        scale = _scale(f"{part.plane}_scale", dtype, addresses)
        low = _scale(f"{part.plane}_min", dtype, addresses) if quant.affine else None
        outer = addresses[f"{part.plane}_outer"] if quant.outer is not None else None
    looked_up = quant.fmt.bits <= 4 and quant.fmt.kind in ("float", "table")
    return ValuePart(
        plane=part.plane,
        start=part.start,
        size=part.size,
        count=whole or str(part.size),
        planes=planes,
        number="" if looked_up else _number(quant),
        levels=code_numbers(quant.fmt) if looked_up else (),
        scale=scale,
        low=low,
        outer=outer,
        block=quant.d_block or 0,
    )


def _scale(name: str, dtype: str, addresses: Mapping[str, Address]) -> ValueScale:
    return ValueScale(name, C_TYPES[dtype], addresses[name], _load(dtype), dtype == "f16")


def _load(dtype: str) -> str:
    """C++ text of a stored number of a type as f32."""
    return {
        "f32": "%s",
        "bf16": "bf16_to_f32(%s)",
        "f16": "small_to_f32<5, 10, 15, 2>(%s)",
        "e8m0": "e8m0_to_f32(%s)",
        "e4m3": "small_to_f32<4, 3, 7, 1>(%s)",
    }[dtype]


def _number(quant: QuantSpec) -> str:
    """C++ text of the number of a code that is computed."""
    fmt = quant.fmt
    if fmt.kind == "plain":
        return _load(fmt.name)
    if fmt.kind == "float":
        return f"small_to_f32<{fmt.exponent}, {fmt.mantissa}, {fmt.bias}, {SPECIAL[fmt.special]}>(%s)"
    half = 1 << (fmt.bits - 1)
    if quant.affine or (fmt.bits == 8 and fmt.own_storage):
        return "(float)%s"
    return f"(float)(%s - {half})" if fmt.offset else f"(float)((%s ^ {half}) - {half})"


def code_numbers(fmt: Codec) -> tuple[float, ...]:
    """What sixteen codes of up to four bits stand for; those past the last level of a table, the last one."""
    if fmt.kind == "float":
        return tuple(float_value(fmt, code & ((1 << fmt.bits) - 1)) for code in range(16))
    return tuple(fmt.levels[min(code, len(fmt.levels) - 1)] for code in range(16))
