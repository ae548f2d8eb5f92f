"""Codec: one registered definition of how numbers become codes; everything about a format in one place.

A codec says what a code is worth. What scales it, and where the scale lies, is the spec's (``QuantSpec``).
Four kinds cover the field:

``plain``    a machine float, stored as it is: f32, bf16, f16.
``integer``  codes of 2, 3, 4 or 8 bits: ``scale * code``, or ``scale * code + min`` where the spec is affine.
``float``    a small float of 4 or 8 bits: sign, exponent and mantissa, as OCP writes them.
``table``    an index into at most 16 ascending levels: a codebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any


@dataclass(frozen=True)
class Codec:
    """A number format."""

    name: str
    """Name used in a spec."""
    kind: str
    """``plain``, ``integer``, ``float`` or ``table``."""
    bits: int
    """Bits of a code (of a number, where it is plain)."""
    qmax: float | None = None
    """Largest magnitude of a code's number: what the largest magnitude of a block is divided by. For affine
    codes see ``QuantSpec.steps``. None for a plain float."""
    own_storage: str = ""
    """Storage type of its codes where it has one of its own (symmetric ones, for integers)."""
    exponent: int = 0
    """Bits of exponent of a ``float``."""
    mantissa: int = 0
    """Bits of mantissa of a ``float``."""
    bias: int = 0
    """What is added to a ``float``'s exponent."""
    special: str = "none"
    """Codes of a ``float`` that are no numbers: ``none``, ``nan`` (all ones is NaN) or ``ieee`` (the largest
    exponent holds infinities and NaN)."""
    levels: tuple[float, ...] = ()
    """What the codes of a ``table`` stand for, 3 to 16 ascending f32 numbers."""
    measure: str = "amax"
    """What a block's scale is made of: ``amax`` over qmax, or ``rms``, its root mean square."""
    offset: bool = False
    """Whether symmetric integer codes are stored as ``code + 2**(bits - 1)``, else in two's complement."""
    fast: bool = False
    """Whether kernels have operands of its own; else its codes become numbers as they are read."""
    keys: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """For a name that stands for a combination: the keys of [cache.k] that it means, ``format`` included."""
    example: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Keys of [cache.k] beside ``format`` that show it, for tests, tables and bench rows."""
    doc: str = field(default="", compare=False)
    """One line for people."""
    source: str = field(default="", compare=False)
    """Paper, standard or project that it comes from."""
    built_in: bool = field(default=False, compare=False)
    """Whether kvgen brings it: its name then says all, everywhere."""

    @property
    def scaled(self) -> bool:
        """Whether an element is a code that a scale multiplies."""
        return self.kind != "plain"

    @property
    def integer(self) -> bool:
        """Whether a code is an integer: what integer arithmetic (``qk``, ``pv`` = ``int8``) needs."""
        return self.kind == "integer"

    @property
    def storage(self) -> str:
        """Storage type of its first plane, symmetric codes (see ``QuantSpec.planes`` for the rest)."""
        return self.own_storage or PACKED_STORAGE[self.plane_bits[0]]

    @property
    def packed(self) -> int:
        """Codes in one stored element of the first plane."""
        return 1 if self.kind == "plain" else 8 // self.plane_bits[0]

    @property
    def plane_bits(self) -> tuple[int, ...]:
        """Bits of a code in each plane that holds it, the low ones first: three bits are two and one."""
        return (2, 1) if self.bits == 3 else (self.bits,)

    @property
    def nan_code(self) -> int | None:
        """The code that a NaN becomes under a given scale, where one is NaN."""
        return (1 << (self.bits - 1)) - 1 if self.special != "none" else None

    def meaning(self) -> dict[str, Any]:
        """All that decides what its codes are worth, as plain values."""
        told = ("example", "doc", "source")
        return {name: item for name, item in self.to_dict().items() if name not in told}

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what an exported library carries of a codec that not every kvgen knows."""
        plain = {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "built_in"}
        return plain | {
            "levels": list(self.levels),
            "keys": dict(self.keys),
            "example": dict(self.example),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Codec:
        """The inverse of ``to_dict``."""
        return cls(**{**values, "levels": tuple(values["levels"])})


PACKED_STORAGE = {8: "u8x1", 4: "u4x2", 2: "u2x4", 1: "u1x8"}
"""Storage type of codes without one of their own, by their bits: bytes of so many."""


TABLE = "table"
"""The codec whose levels a spec gives by itself; without them they are 0 to 15."""


CODECS: dict[str, Codec] = {}
"""Registered codecs by name."""


def register(codec: Codec, *, built_in: bool = False) -> Codec:
    """Make a codec known for the rest of the process.

    Unless it is ``built_in`` (kvgen brings it), what it means becomes part of the identity of specs: a copy
    of one of kvgen's codecs under another name is no longer kvgen's.

    Raises ``ValueError`` where its name is taken or its facts contradict each other.
    """
    if codec.name in CODECS:
        raise ValueError(f"codec {codec.name!r} is registered already")
    check_codec(codec)
    known = codec if codec.built_in == built_in else replace(codec, built_in=built_in)
    CODECS[codec.name] = known
    return known


@contextmanager
def registered(*codecs: Codec) -> Iterator[None]:
    """Codecs known inside a ``with`` block."""
    done: list[Codec] = []
    try:
        for codec in codecs:
            done.append(register(codec))
        yield
    finally:
        for codec in done:
            del CODECS[codec.name]


def check_codec(codec: Codec) -> None:
    """Raise ``ValueError`` where a definition cannot be what it says."""
    known = {"plain": (16, 32), "integer": (2, 3, 4, 8), "float": (4, 8), "table": (2, 3, 4)}
    if codec.kind not in known:
        raise ValueError(f"codec {codec.name!r}: kind {codec.kind!r} is not one of {', '.join(known)}")
    if codec.keys:
        return
    if codec.bits not in known[codec.kind]:
        raise ValueError(
            f"codec {codec.name!r}: {codec.bits} bits; {codec.kind} codes have {known[codec.kind]}"
        )
    if codec.kind == "float" and 1 + codec.exponent + codec.mantissa != codec.bits:
        raise ValueError(f"codec {codec.name!r}: 1 + exponent + mantissa must be bits = {codec.bits}")
    if codec.kind == "float" and not (1 <= codec.exponent <= 5 and codec.mantissa >= 1):
        raise ValueError(f"codec {codec.name!r}: 1 to 5 bits of exponent and at least one of mantissa")
    if codec.kind == "table":
        rising = all(a < b for a, b in zip(codec.levels, codec.levels[1:], strict=False))
        if not rising or table_bits(len(codec.levels)) != codec.bits:
            raise ValueError(f"codec {codec.name!r}: {codec.bits} bits need ascending levels that fill them")
    if codec.scaled and not (codec.qmax is not None and codec.qmax > 0):
        raise ValueError(f"codec {codec.name!r}: qmax = {codec.qmax}: give the largest magnitude of a code")


def with_levels(levels: tuple[float, ...], measure: str) -> Codec:
    """``TABLE`` with the levels that a spec gives."""
    top = max(map(abs, levels), default=0.0)
    bits = table_bits(len(levels))
    return replace(CODECS[TABLE], levels=levels, measure=measure, bits=bits, qmax=top)


def table_bits(levels: int) -> int:
    """Bits of the index of a table: 2 for 3 and 4 levels, 3 for up to 8, 4 for up to 16."""
    return max(2, ceil(log2(levels))) if levels > 0 else 0


def float_value(codec: Codec, code: int) -> float:
    """What a code of a ``float`` stands for: exact in f64."""
    exponent = code >> codec.mantissa & ((1 << codec.exponent) - 1)
    fraction = code & ((1 << codec.mantissa) - 1)
    sign = -1.0 if code >> (codec.bits - 1) else 1.0
    top = exponent == (1 << codec.exponent) - 1
    if codec.special == "ieee" and top:
        return float("nan") if fraction else sign * float("inf")
    if codec.special == "nan" and top and fraction == (1 << codec.mantissa) - 1:
        return float("nan")
    size = fraction / (1 << codec.mantissa)
    if exponent:
        return float(sign * (1.0 + size) * 2.0 ** (exponent - codec.bias))
    return float(sign * size * 2.0 ** (1 - codec.bias))
