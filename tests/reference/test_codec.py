"""The oracle's codecs: exhaustive over 16-bit formats and int8 codes, against torch and exact fractions."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgen.errors import ArgumentError
from kvgen.reference import (
    bf16_to_f32,
    decode_values,
    encode_rows,
    encode_static,
    f32_to_bf16,
    store_float,
    widen,
)

F32 = np.float32
TINY = 2.0**-100
ALL_BF16 = np.arange(2**16, dtype=np.uint32)


def same(a: Any, b: Any) -> bool:
    """Equal values, a NaN equal to any NaN; signed zeros differ."""
    return bool(np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b)))


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_rounds_all_neighbours_as_torch_does(low: int) -> None:
    """Every bf16 value, exact, just above it, around and at the tie, and just below the next one."""
    x = (ALL_BF16 << 16 | low).astype(np.uint32).view(F32)
    ours = bf16_to_f32(f32_to_bf16(x))
    theirs = torch.from_numpy(x.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(np.isnan(ours), np.isnan(x))
    finite = ~np.isnan(x)
    assert same(ours[finite], theirs[finite])


def test_bf16_ties_go_to_the_even_neighbour() -> None:
    below = ALL_BF16[ALL_BF16 & 0x7FFF < 0x7F7F]
    ties = (below << 16 | 0x8000).astype(np.uint32).view(F32)
    assert np.array_equal(f32_to_bf16(ties), below + (below & 1))


def test_bf16_edges() -> None:
    x = np.array([3.4028235e38, -3.4028235e38, np.inf, 1e-45, -0.0], F32)
    assert f32_to_bf16(x).tolist() == [0x7F80, 0xFF80, 0x7F80, 0x0000, 0x8000]
    # A NaN whose payload sits in the bits that are cut off must not become an infinity.
    assert np.isnan(bf16_to_f32(f32_to_bf16(np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(F32)))).all()
    assert f32_to_bf16(F32(1.0)).shape == ()
    assert f32_to_bf16(np.ones((2, 0, 3), F32)).shape == (2, 0, 3)


def test_every_bf16_and_f16_code_survives_a_round_trip() -> None:
    codes = ALL_BF16.astype(np.uint16)
    number = ~np.isnan(bf16_to_f32(codes))
    assert np.array_equal(f32_to_bf16(bf16_to_f32(codes))[number], codes[number])
    halves = codes.view(np.float16)
    assert same(store_float(halves.astype(F32), "f16"), halves)
    assert same(widen(halves), torch.from_numpy(halves.copy()).to(torch.float64).numpy())


@pytest.mark.parametrize("nudge", [-1, 0, 1])
def test_f16_rounds_as_torch_does(nudge: int) -> None:
    """All f16 ties (0x1000 below the kept bits of an f32), and one step to either side of them."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(F32)
    x = ((halves.view(np.uint32) | 0x1000).astype(np.int64) + nudge).astype(np.uint32).view(F32)
    theirs = torch.from_numpy(x.copy()).to(torch.float16).numpy()
    assert same(store_float(x, "f16"), theirs)
    assert store_float(np.array([65520.0, -1e9, 65519.0], F32), "f16").tolist() == [np.inf, -np.inf, 65504.0]


@pytest.mark.parametrize("power", [-100, -20, -3, 0, 5, 119])
def test_int8_codes_are_exact_for_a_power_of_two_scale(power: int) -> None:
    """All 255 codes, the ties between them (to even) and their neighbours; amax is 127 * 2**power."""
    step = F32(2.0**power)
    code = np.arange(-127, 128)
    row = (code * step).astype(F32)
    codes, scale = encode_rows(row, "int8")
    assert scale == step
    assert np.array_equal(codes, code)
    assert np.array_equal(decode_values(codes, "int8", scale), row.astype(np.float64))
    ties = ((code[:-1] + 0.5) * float(step)).astype(F32)
    for x, expected in (
        (ties, [round(c + 0.5) for c in code[:-1].tolist()]),
        (np.nextafter(ties, F32(np.inf)), code[1:]),
        (np.nextafter(ties, F32(-np.inf)), code[:-1]),
    ):
        codes, _ = encode_rows(np.concatenate([x, [127 * step]]).astype(F32), "int8")
        assert np.array_equal(codes[:-1], expected)
        assert np.array_equal(encode_static(x, step, "int8"), expected)


@given(st.integers(0, 2**32 - 1), st.integers(-126, 127))
def test_int8_rows_follow_the_rule_in_f32(seed: int, power: int) -> None:
    """Against torch's f32 arithmetic, and within half a step (and f32's own rounding) of the value."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((7, 24)) * 2.0 ** min(power, 120)).astype(F32)
    codes, scale = encode_rows(x, "int8")
    t = torch.from_numpy(x)
    amax = t.abs().amax(-1)
    live = amax >= TINY
    want = torch.where(live, amax / 127, 0.0)
    assert np.array_equal(scale, want.numpy())
    inv = 1.0 / torch.where(live, want, 1.0)
    expected = torch.where(live[:, None], torch.round(t * inv[:, None]).clamp(-127, 127), 0.0)
    assert np.array_equal(codes, expected.to(torch.int8).numpy())
    error = np.abs(decode_values(codes, "int8", scale) - x.astype(np.float64))
    assert (error <= np.where(live.numpy(), scale * (0.5 + 1e-4), TINY)[:, None]).all()
    assert codes.min() >= -127


def test_int8_scale_is_the_correctly_rounded_quotient() -> None:
    rng = np.random.default_rng(1)
    for amax in rng.uniform(0.1, 9.0, 200).astype(F32):
        _, scale = encode_rows(np.array([amax, 0], F32), "int8")
        exact = Fraction(float(amax)) / 127
        around = [np.nextafter(scale, F32(0)), scale, np.nextafter(scale, F32(np.inf))]
        assert min(around, key=lambda s: abs(Fraction(float(s)) - exact)) == scale


def test_int8_multiplies_by_the_rounded_inverse() -> None:
    """Near ties x * (1 / scale) and x / scale round apart: the rule is the product, as kernels compute it."""
    rng = np.random.default_rng(2)
    amax = rng.uniform(1, 2, 2000).astype(F32)
    ties = ((rng.integers(-126, 126, 2000) + 0.5) * (amax / F32(127))).astype(F32)
    codes, scale = encode_rows(np.stack([amax, ties], axis=-1), "int8")
    product = np.rint(ties * (F32(1) / scale))
    assert (product != np.rint(ties / scale)).sum() > 20  # or the test would show nothing
    assert np.array_equal(codes[:, 1], product)


def test_int8_rows_with_odd_values() -> None:
    """Zero, denormal, just below and at the threshold, an outlier, the largest f32, inf and NaN."""
    rows = np.zeros((9, 16), F32)
    rows[1, :2] = 1e-45, -1e-40
    rows[2, 3] = np.nextafter(F32(TINY), F32(0))
    rows[3, 3] = -TINY
    rows[4, :3] = 1e4, 1.0, -40.0
    rows[5, :2] = 3.4028235e38, -1.7e38
    rows[6, 5], rows[7, 5], rows[8, 5] = np.inf, -np.inf, np.nan
    rows[6:, 0] = 2.0
    codes, scale = encode_rows(rows, "int8")
    assert scale[:3].tolist() == [0, 0, 0] and not codes[:3].any()
    assert scale[3] == F32(TINY) / F32(127) and codes[3].tolist() == [0, 0, 0, -127] + [0] * 12
    assert codes[4, :3].tolist() == [127, 0, -1]
    assert codes[5, :2].tolist() == [127, -63] and np.isfinite(scale[5])
    assert scale[6:].view(np.uint32).tolist() == [0x7FC00000] * 3 and not codes[6:].any()
    values = decode_values(codes, "int8", scale)
    assert np.isnan(values[6:]).all() and np.isfinite(values[:6]).all()


def test_int8_static_scales_saturate() -> None:
    x = np.array([[1e30, -1e30, np.inf, -np.inf, np.nan, 63.5, -0.0]], F32)
    assert encode_static(x, F32(0.5), "int8").tolist() == [[127, -127, 127, -127, 0, 127, 0]]
    per_head = encode_static(np.ones((3, 2, 4), F32), np.array([1.0, 0.5], F32), "int8")
    assert per_head[0].tolist() == [[1] * 4, [2] * 4]
    for bad in (0.0, -1.0, np.nan, np.inf, 2.0**-101):
        with pytest.raises(ArgumentError, match="finite"):
            encode_static(x, F32(bad), "int8")


def test_nothing_is_reinterpreted() -> None:
    assert widen(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1.0, -2.0]
    for dtype in (np.int32, np.int16, np.int8, bool):
        with pytest.raises(ArgumentError, match="expected float64"):
            widen(np.ones(2, dtype))
    with pytest.raises(ArgumentError, match="without their scales"):
        decode_values(np.ones(2, np.int8), "int8")


def test_the_oracle_needs_numpy_only() -> None:
    code = "import sys, kvgen.reference; sys.exit(bool({'torch', 'triton', 'sympy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
