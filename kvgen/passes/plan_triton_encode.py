"""plan how numbers become codes in Triton, and scales what is stored: the facts of a codec as the integers
that ``_coded.jinja`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from struct import pack, unpack

from kvgen.ir import QuantSpec
from kvgen.ir.codec import CODECS, Codec
from kvgen.passes.plan_triton_hadamard import to_f32

MANTISSA, BIAS = 23, 127
"""Of f32."""

LARGEST = {"f32": 2.0**127 * (2 - 2.0**-23), "f16": 65504.0, "bf16": 2.0**127 * (2 - 2.0**-7)}
"""Largest finite value of each type of scale that is no codec."""


@dataclass(frozen=True)
class Encoder:
    """One function from numbers to codes."""

    name: str
    kind: str
    """``integer``, ``float`` or ``table``."""
    bits: int
    low: float = 0.0
    high: float = 0.0
    """Least and largest code of an integer, before ``offset`` and ``mask``."""
    offset: int = 0
    """Added to an integer's code."""
    mask: int = 0
    """What stays of it in two's complement; 0 where a byte holds nothing else."""
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    """Of a float."""
    largest: float = 0.0
    nan: int = 0
    """The code of NaN."""
    bounds: tuple[float, ...] = ()
    """Middles of neighbouring levels of a table."""

    @property
    def cut(self) -> int:
        """Bits of f32's mantissa that go."""
        return MANTISSA - self.mantissa

    @property
    def half(self) -> str:
        """Just under half of the lowest bit that stays."""
        return f"{(1 << (self.cut - 1)) - 1:#x}"

    @property
    def rebias(self) -> int:
        """The difference of the exponents' biases, above the mantissa."""
        return (BIAS - self.bias) << self.mantissa

    @property
    def normal(self) -> str:
        """The least normal number, in words."""
        return f"2**{1 - self.bias}"

    @property
    def normal_bits(self) -> str:
        """Its bits as f32."""
        return f"{(BIAS + 1 - self.bias) << MANTISSA:#x}"

    @property
    def step_number(self) -> float:
        """The least number above 0."""
        return float(2.0 ** (1 - self.bias - self.mantissa))

    @property
    def step(self) -> str:
        """The same in words."""
        return f"2**{1 - self.bias - self.mantissa}"

    @property
    def magic(self) -> float:
        """The power of two whose f32 neighbours are that far away."""
        return float(2.0**MANTISSA * self.step_number)

    @property
    def magic_bits(self) -> str:
        """Its bits as f32."""
        return f"{_bits(self.magic):#x}"

    @property
    def largest_bits(self) -> str:
        """The bits of the largest number."""
        return f"{_bits(self.largest):#x}"

    @property
    def sign(self) -> str:
        """The bit of the sign."""
        return f"{1 << (self.bits - 1):#x}"


@dataclass(frozen=True)
class ScaleType:
    """A type of stored scales."""

    name: str
    largest: float
    clamped: bool
    """Whether a scale may be past the largest number of the type, and is not saturated by its rounding."""
    encoder: Encoder | None
    """Of a type that is a small float."""


def encoder_of(quant: QuantSpec) -> Encoder:
    """The function that makes the codes of a storage."""
    fmt = quant.fmt
    if fmt.kind == "float":
        return _float_encoder(fmt)
    if fmt.kind == "table":
        pairs = zip(fmt.levels, fmt.levels[1:], strict=False)
        bounds = tuple(to_f32(to_f32(to_f32(a) + to_f32(b)) * 0.5) for a, b in pairs)
        return Encoder(f"to_level_of_{len(fmt.levels)}_{fmt.name}", "table", fmt.bits, bounds=bounds)
    if quant.affine:
        return Encoder(f"to_step_of_{quant.steps:.0f}", "integer", fmt.bits, 0.0, float(quant.steps))
    top = float(fmt.qmax or 0)
    offset = 1 << (fmt.bits - 1) if fmt.offset else 0
    mask = (1 << fmt.bits) - 1 if fmt.bits < 8 and not offset else 0
    return Encoder(f"to_int{fmt.bits}", "integer", fmt.bits, -top, top, offset, mask)


def scale_type(dtype: str, wide: bool) -> ScaleType:
    """A type of scales; ``wide``: a division by an outer scale may leave the range of f32."""
    encoder = _float_encoder(CODECS[dtype]) if dtype not in LARGEST else None
    clamped = encoder is None and (dtype != "f32" or wide)
    return ScaleType(dtype, LARGEST.get(dtype, 0.0), clamped, encoder)


def _float_encoder(fmt: Codec) -> Encoder:
    return Encoder(
        f"to_e{fmt.exponent}m{fmt.mantissa}",
        "float",
        fmt.bits,
        exponent=fmt.exponent,
        mantissa=fmt.mantissa,
        bias=fmt.bias,
        largest=float(fmt.qmax or 0),
        nan=fmt.nan_code or 0,
    )


def _bits(x: float) -> int:
    return int(unpack("<I", pack("<f", x))[0])
