"""Blocks that share a scale, against the rules in exact fractions: every codec, type of scale, odd value."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from kvgen.ir import QuantSpec
from kvgen.ir.codec import CODECS
from kvgen.reference.blocks import dequantise, quantise
from tests.reference import exact

F32 = np.float32
WIDTH = 16
ROW = (("d", WIDTH), ("head", 1), ("tok", 1))
SCALES = ("f32", "f16", "bf16", "e8m0", "e4m3")
CODED = [c for c in CODECS.values() if c.scaled and not c.keys]

QUANTS = [
    *(
        QuantSpec(c.name, ROW, dtype)
        for c in CODED
        for dtype in SCALES
        if c.measure == "amax" or dtype != "e8m0"
    ),
    *(QuantSpec(c.name, ROW, dtype, affine=True) for c in CODED if c.integer for dtype in SCALES[:3]),
    QuantSpec("table", ROW, "f16", levels=(-1.0, -0.25, 0.3, 1.5)),
]
OUTER = [
    QuantSpec(name, ROW, dtype, outer=()) for name in ("e2m1", "int4") for dtype in ("e4m3", "f16", "f32")
]


def name(quant: QuantSpec) -> str:
    return f"{quant.format}-{quant.scale_dtype}{'-affine' * quant.affine}"


def blocks() -> np.ndarray:
    """f32 [block, WIDTH]: ordinary ones of many sizes, and each kind that codecs get wrong."""
    rng = np.random.default_rng(5)
    sizes = 2.0 ** np.array([0, 0, 1, -3, 5, -20, 17, 60, 120, -60, -98], float)
    rows = [rng.standard_normal(WIDTH) * size for size in sizes]
    rows += [np.zeros(WIDTH), np.full(WIDTH, -0.0), np.full(WIDTH, 3.7), np.full(WIDTH, -(2.0**-3))]
    rows += [np.where(np.arange(WIDTH) % 2, -0.0, 0.0), np.full(WIDTH, 2.0**-100), np.full(WIDTH, 1e-45)]
    rows += [np.arange(WIDTH) * 2.0**-102, 5 + np.arange(WIDTH) * 2.0**-20]  # the range is near what is lost
    rows += [np.arange(WIDTH) - 7.5, (np.arange(WIDTH) - 7) * 0.5, np.arange(WIDTH) * 17.0, 100 + rows[0]]
    rows += [np.where(np.arange(WIDTH) == 3, 1e4, rows[1]), np.where(np.arange(WIDTH) == 9, 3.4e38, rows[2])]
    rows += [np.where(np.arange(WIDTH) == 0, 3.4e38, -3.4e38), np.where(np.arange(WIDTH) == 1, 7e4, -7e4)]
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        rows.append(np.where(np.arange(WIDTH) == 5, bad, rows[0]))
    tiny = np.nextafter(F32(2.0**-100), F32(0))
    rows += [np.where(np.arange(WIDTH) == 2, tiny, 0.0), np.where(np.arange(WIDTH) == 2, -(2.0**-100), 0.0)]
    return np.array(rows).astype(F32)


def read_scale(stored: np.ndarray, dtype: str) -> list[Fraction | None]:
    """Scales as they are read, by torch; None for NaN."""
    if dtype == "e8m0":
        return [None if byte == 255 else Fraction(2) ** (int(byte) - 127) for byte in stored.tolist()]
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
    bits = torch.from_numpy(np.ascontiguousarray(stored).view(np.uint8).copy())
    values = bits.view(kinds[dtype]).double().tolist()
    return [None if value != value else Fraction(value) for value in values]


def check(rows: np.ndarray, quant: QuantSpec, outer: float | None = None) -> None:
    """``quantise`` of rows [block, WIDTH] against ``exact.block``, and what it stands for."""
    above = None if outer is None else np.float32(outer)
    coded = quantise(rows[:, None, :], quant, outer=above)
    scales = read_scale(coded.scale[:, 0, 0], quant.scale_dtype)
    lows = (
        [Fraction(0)] * len(rows) if coded.low is None else read_scale(coded.low[:, 0, 0], quant.scale_dtype)
    )
    values = dequantise(coded.codes.transpose(1, 0, 2)[:, :, None], quant, *[
        None if part is None else part.transpose(1, 0, 2)[:, :, None] for part in (coded.scale, coded.low)
    ], above)[0, :, 0]  # fmt: skip
    for at, row in enumerate(rows):
        codes, scale, low = exact.block(
            row.tolist(), quant, None if outer is None else float(np.float32(outer))
        )
        assert coded.codes[at, 0].tolist() == codes, (at, row)
        if scale == 0 and quant.scale_dtype == "e8m0":
            assert coded.scale[at, 0, 0] == 0  # which reads as 2**-127
            continue
        if coded.low is not None and row.min() == 0:
            assert not coded.low[at].view(np.uint8).any()  # and not -0.0, whatever came first
        assert (scales[at], lows[at]) == (scale, low), (at, row)
        if scale is None:
            assert np.isnan(values[at]).all()
            continue
        whole = scale * (1 if outer is None else Fraction(float(np.float32(outer))))
        numbers = [exact.number(code, quant) for code in codes]
        wanted = [number * whole + low for number in numbers if number is not None]
        assert values[at].tolist() == pytest.approx([float(x) for x in wanted], rel=1e-15)


@pytest.mark.parametrize("quant", QUANTS, ids=name)
def test_blocks_follow_the_rules(quant: QuantSpec) -> None:
    check(blocks(), quant)


@pytest.mark.parametrize("quant", OUTER, ids=name)
def test_a_scale_above_the_scales_comes_into_every_product(quant: QuantSpec) -> None:
    """nvfp4's second level: well chosen, so small that scales saturate, so large that they vanish."""
    for outer in (2.3e-3, 2.0**-90, 2.0**60):
        check(blocks(), quant, outer)


@pytest.mark.parametrize("dtype", SCALES)
def test_a_bad_block_has_the_canonical_nan(dtype: str) -> None:
    rows = np.full((3, 1, WIDTH), 1.0, F32)
    rows[:, 0, 3] = np.array([0xFFC12345, 0x7F800001, 0xFF800000], np.uint32).view(F32)
    scale = quantise(rows, QuantSpec("int8", ROW, dtype)).scale
    wanted = {"f32": "0000c07f", "f16": "007e", "bf16": "c07f", "e4m3": "7f", "e8m0": "ff"}[dtype]
    assert scale.tobytes().hex() == wanted * 3
    if dtype in SCALES[:3]:
        assert quantise(rows, QuantSpec("int2", ROW, dtype, affine=True)).low.tobytes().hex() == wanted * 3


def test_powers_of_two_are_those_of_ocp() -> None:
    """OCP MX 1.0: 2 ** (floor(log2 amax) - emax): 8 for e4m3, 15 for e5m2, 2 for e2m1; bias 127."""
    for fmt, emax in (("e4m3", 8), ("e5m2", 15), ("e2m1", 2), ("int8", 6)):
        for amax in (1.0, 1.99, 2.0, 0.7, 448.0, 449.0, 2.0**-99, 3e38):
            rows = np.full((1, 1, WIDTH), -amax, F32)
            byte = int(quantise(rows, QuantSpec(fmt, ROW, "e8m0")).scale[0, 0, 0])
            assert byte == 127 + int(np.floor(np.log2(amax))) - emax


@pytest.mark.parametrize(
    ("fmt", "affine"),
    [("int4", False), ("int4", True), ("int3", False), ("int3", True), ("e4m3", False), ("lloyd2", False)],
)
@pytest.mark.parametrize("group", [{"tok": 4, "d": 1}, {"tok": 4}, {"tok": 2, "d": 16}], ids=str)
def test_tokens_that_share_a_scale(fmt: str, affine: bool, group: dict[str, int]) -> None:
    """Blocks over tokens are blocks of the numbers in them; a protected token has code bits 0 and no say."""
    quant = QuantSpec(fmt, tuple(sorted({"head": 1, **group}.items())), "bf16", affine=affine)
    alone = QuantSpec(fmt, ROW, "bf16", affine=affine)
    rng = np.random.default_rng(9)
    x = (rng.standard_normal((8, 2, 32)) + 0.5).astype(F32)
    kept = np.array([False, True, True, True, True, True, False, False])
    x[0] = np.nan
    x[5, 1, 20] = np.inf
    coded = quantise(x, quant, kept=kept)
    span, block = group["tok"], group.get("d", 32)
    assert coded.scale.shape == (8 // span, 2, 32 // block)
    for t in range(0, 8, span):
        for head in range(2):
            for d in range(0, 32, block):
                cell = x[t : t + span, head, d : d + block][kept[t : t + span]]
                found = coded.codes[t : t + span, head, d : d + block]
                assert not found[~kept[t : t + span]].any()
                if cell.size:
                    codes, scale, low = exact.block(cell.reshape(-1).tolist(), alone)
                    assert found[kept[t : t + span]].reshape(-1).tolist() == codes
                    at = (t // span, head, d // block)
                    assert read_scale(coded.scale[at].reshape(1), "bf16") == [scale]
                    if affine:
                        assert read_scale(coded.low[at].reshape(1), "bf16") == [low]


@pytest.mark.parametrize("fmt", [c.name for c in CODED if c.measure == "amax"])
def test_given_scales_multiply_by_their_inverse(fmt: str) -> None:
    quant, x = QuantSpec(fmt, (("head", 1),)), blocks()[:, None, :].repeat(2, axis=1)
    given = np.array([0.37, 2.0**-5], F32)
    codes = quantise(x, quant, given=given).codes
    for head, scale in enumerate(given):
        with np.errstate(over="ignore"):
            scaled = x[:, head] * (F32(1) / scale)
        for value, code in zip(scaled.reshape(-1), codes[:, head].reshape(-1), strict=True):
            if np.isnan(value):
                zero = exact.code(Fraction(0), False, quant)
                assert code == (0x7F if quant.fmt.special != "none" else zero)
            else:
                finite = float(np.clip(value, -1e38, 1e38))
                assert code == exact.code(Fraction(finite), bool(np.signbit(value)), quant)
