"""C++ spellings of storage types and of scalar conversions between them and f32."""

from __future__ import annotations

C_TYPES = {
    "f32": "float",
    "bf16": "uint16_t",
    "f16": "uint16_t",
    "int8": "int8_t",
    "int4x2": "uint8_t",
    "e4m3": "uint8_t",
    **dict.fromkeys(("e5m2", "e8m0", "u8x1", "u4x2", "u2x4", "u1x8"), "uint8_t"),
    "i32": "int32_t",
    "i64": "int64_t",
    "u8": "char",
}
"""C++ type that holds an element of each storage type."""

SCALAR_HELPERS = ("bf16_to_f32", "f32_to_bf16", "e4m3_to_f32", "f32_to_e4m3", "no_infinity")
"""Scalar helpers that are the same on every ISA row; the others are in the row's own file."""

SCALE_HELPERS = ("to_integer", "find_scale")
"""Helpers that encode scaled formats, the same on every ISA row."""


def to_f32(dtype: str, text: str) -> str:
    """``text`` (an element of ``dtype``) as a float expression."""
    if dtype == "f32":
        return text
    return f"(float){text}" if dtype == "int8" else f"{dtype}_to_f32({text})"


def from_f32(dtype: str, text: str) -> str:
    """``text`` (a float expression) rounded to ``dtype``."""
    return text if dtype == "f32" else f"f32_to_{dtype}({text})"


def reading(dtype: str) -> set[str]:
    """Names of the helpers that ``to_f32`` needs for ``dtype``."""
    return {f"{dtype}_to_f32"} if dtype in ("bf16", "f16", "e4m3") else set()


def writing(dtype: str) -> set[str]:
    """Names of the helpers that ``from_f32`` needs for ``dtype``."""
    return {f"f32_to_{dtype}"} if dtype in ("bf16", "f16") else set()
