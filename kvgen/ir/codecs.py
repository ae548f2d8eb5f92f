"""The built-in codecs, one definition each. To add one, register it: no pass and no template changes."""

from __future__ import annotations

from kvgen.ir.codec import TABLE, Codec, register

ROW = {"tok": 1, "head": 1}
"""A scale for each token and head."""

GAUSSIAN = {
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
"""Positive levels of the quantiser with the least mean square error for N(0, 1), by bits (Lloyd 1957, Max
1960): what the elements of a rotated row are, nearly, in units of the row's root mean square."""


def _gaussian(bits: int) -> Codec:
    half = GAUSSIAN[bits]
    return Codec(
        f"lloyd{bits}",
        "table",
        bits,
        half[-1],
        levels=tuple(-x for x in reversed(half)) + half,
        measure="rms",
        example={"group": ROW, "transform": "hadamard"},
        doc=f"{1 << bits} levels of least error for a rotated row, in units of its root mean square",
        source="TurboQuant (arXiv 2504.19874), the MSE variant; levels of Lloyd and Max",
    )


for codec in (
    Codec("f32", "plain", 32, own_storage="f32", fast=True, doc="IEEE single precision", source="IEEE 754"),
    Codec("bf16", "plain", 16, own_storage="bf16", fast=True, doc="the upper half of f32", source="TPU"),
    Codec("f16", "plain", 16, own_storage="f16", fast=True, doc="IEEE half precision", source="IEEE 754"),
    Codec(
        "int8", "integer", 8, 127, own_storage="int8", fast=True, doc="-127 to 127, or 0 to 255 where affine",
        source="LLM.int8(), vLLM's int8 caches",
    ),
    Codec(
        "int4", "integer", 4, 7, own_storage="int4x2", fast=True, doc="-7 to 7, or 0 to 15 where affine",
        source="KIVI (arXiv 2402.02750), Atom (arXiv 2310.19102)",
    ),
    Codec(
        "int3", "integer", 3, 3, offset=True, example={"affine": True, "group": ROW | {"d": 32}},
        doc="-3 to 3, or 0 to 7 where affine: a plane of 2 bits and one of 1",
        source="KVQuant (arXiv 2401.18079)",
    ),
    Codec(
        "int2", "integer", 2, 1, offset=True, example={"affine": True, "group": ROW | {"d": 32}},
        doc="-1 to 1, or 0 to 3 where affine", source="KIVI (arXiv 2402.02750)",
    ),
    Codec(
        "e4m3", "float", 8, 448, own_storage="e4m3", exponent=4, mantissa=3, bias=7, special="nan", fast=True,
        doc="fp8 with 4 bits of exponent: no infinities, up to 448", source="OCP OFP8 1.0",
    ),
    Codec(
        "e5m2", "float", 8, 57344, own_storage="e5m2", exponent=5, mantissa=2, bias=15, special="ieee",
        doc="fp8 with 5 bits of exponent: the upper half of f16, up to 57344", source="OCP OFP8 1.0",
    ),
    Codec(
        "e2m1", "float", 4, 6, exponent=2, mantissa=1, bias=1, example={"group": ROW | {"d": 32}},
        doc="fp4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives", source="OCP MX 1.0",
    ),
    Codec(
        TABLE, "table", 4, 15, levels=tuple(map(float, range(16))),
        example={"levels": [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0], "group": ROW | {"d": 32}},
        doc="3 to 16 levels of your own: [cache.k] levels, and measure",
        source="KVQuant (arXiv 2401.18079), nuq",
    ),
    *(_gaussian(bits) for bits in GAUSSIAN),
    Codec(
        "mxfp8", "float", 8, keys={"format": "e4m3", "group": ROW | {"d": 32}, "scale_dtype": "e8m0"},
        doc="e4m3 with a power of two for each 32 elements", source="OCP MX 1.0",
    ),
    Codec(
        "mxfp4", "float", 4, keys={"format": "e2m1", "group": ROW | {"d": 32}, "scale_dtype": "e8m0"},
        doc="e2m1 with a power of two for each 32 elements", source="OCP MX 1.0",
    ),
    Codec(
        "nvfp4", "float", 4,
        keys={"format": "e2m1", "group": ROW | {"d": 16}, "scale_dtype": "e4m3", "outer": {}},
        doc="e2m1 with an e4m3 scale for each 16 elements, and one f32 scale for all",
        source="NVIDIA Blackwell's NVFP4",
    ),
):  # fmt: skip
    register(codec, built_in=True)
