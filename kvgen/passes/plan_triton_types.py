"""Number types of a Triton kernel: what each dot computes in, and the texts that convert to it.

Products are exact wherever one operand type holds both sides: both 16-bit floats fit tf32 (8 exponent and
10 mantissa bits), which serves a cache of another 16-bit type than the query's. For codes see
``plan_triton_codec``. Sums are f32 always.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir import Spec, Target
from kvgen.passes.plan_triton_codec import Codec

TL = {"f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16", "int8": "tl.int8"}
"""Triton's name of each storage type."""

POINTER = {
    "f32": "*fp32",
    "bf16": "*bf16",
    "f16": "*fp16",
    "int8": "*i8",
    "int4x2": "*i8",
    "e4m3": "*i8",
    **dict.fromkeys(("e5m2", "e8m0", "u8x1", "u4x2", "u2x4", "u1x8"), "*u8"),
    "i32": "*i32",
    "i64": "*i64",
    "u8": "*u8",
}
"""Triton's pointer to each element type of the ABI. Codes of e4m3 are bytes: sm_80 has no such type."""


@dataclass(frozen=True)
class Dot:
    """How one of the two products of attention is computed."""

    compute: str
    """Type both operands are brought to: ``bf16``, ``f16``, ``f32``, or ``int8`` for q as int8 digits."""
    precision: str
    """``input_precision`` of an f32 product: ``tf32``, ``ieee``; empty for 16-bit operands."""
    left: str
    """Text put around q or the weights: ``{}.to(tl.bfloat16)``."""
    right: str
    """Text put around a tile of K or V, loaded or decoded."""

    @property
    def options(self) -> str:
        """Keyword arguments that follow the operands of ``tl.dot``."""
        if self.compute == "int8":
            return ", out_dtype=tl.int32"
        return f', input_precision="{self.precision}"' if self.precision else ""


def qk_dot(spec: Spec, target: Target, codec: Codec) -> Dot:
    """q . k: q and the stored K meet in a type that holds both."""
    q, k = spec.attention.q_dtype, spec.cache.k.fmt.storage
    if codec.q in ("digits", "codes"):
        return Dot("int8", "", widen_text(q, "f32", target), "{}")  # q is split into digits from f32
    if codec.q == "units":
        return Dot("f16", "", widen_text(q, "f32", target), widen_text(codec.k.kind or k, "f16", target))
    compute, precision = common(q, k, target)
    if target.interpreted and compute == "bf16":
        compute, precision = "f32", "ieee"
    have = codec.k.kind or k
    return Dot(compute, precision, widen_text(q, compute, target), widen_text(have, compute, target))


def pv_dot(spec: Spec, target: Target, codec: Codec) -> Dot:
    """weights . v: the weights carry at least the precision of the query's type."""
    q, v = spec.attention.q_dtype, spec.cache.v.fmt.storage
    if v == "f16" and q == "bf16":
        compute, precision = "f16", ""  # V exactly, and weights finer than bf16
    else:
        compute, precision = common(q, v, target)
    have = codec.v.kind or v
    if target.interpreted and compute == "bf16":
        # The interpreter multiplies bf16 as if the bits were integers: keep the values, widen the type.
        return Dot("f32", "ieee", "from_bf16(to_bf16({}))", widen_text(have, "f32", target))
    left = "{}" if compute == "f32" else f"{{}}.to({TL[compute]})"
    return Dot(compute, precision, left, widen_text(have, compute, target))


def store_text(value: str, dtype: str, target: Target) -> str:
    """An f32 ``value`` rounded to nearest even to ``dtype``, as text."""
    if dtype == "f32":
        return value
    if dtype == "bf16" and target.interpreted:
        return f"to_bf16({value})"  # the interpreter's own cast truncates
    return (
        f"{value}.to({TL[dtype]})"
        if value.isidentifier() or value.endswith(")")
        else f"({value}).to({TL[dtype]})"
    )


def widen_text(have: str, want: str, target: Target) -> str:
    """A value of type ``have`` in the type ``want`` that holds it exactly, as a format of its text."""
    if have == want:
        return "{}"
    if have == "bf16" and target.interpreted:
        return "from_bf16({})"
    return f"{{}}.to({TL[want]})"


def needs_casts(target: Target, *dtypes: str) -> bool:
    """Whether the module needs its own bf16 casts."""
    return target.interpreted and "bf16" in dtypes


def common(q: str, stored: str, target: Target) -> tuple[str, str]:
    """The operand type that holds a query of type ``q`` and stored elements exactly."""
    if q == "f32":
        # AMD's matrix cores multiply f32. NVIDIA's do not: three tf32 products give 22 bits, within 2e-6,
        # where plain FMAs would hold a whole row of q in each thread's registers and spill.
        return "f32", "ieee" if target.interpreted or target.arch.startswith("gfx") else "tf32x3"
    if stored in ("int8", "int4x2", "e4m3"):
        return "f16", ""
    if stored == q:
        return q, ""
    return "f32", "tf32"
