"""Every code of every codec of 8 bits and less: what it stands for, and which numbers become it."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.ir import QuantSpec
from kvgen.ir.codec import CODECS, Codec, registered
from kvgen.reference.codes import code_values, numbers_to_codes
from tests.reference import exact

F32 = np.float32
MINE = (
    Codec("e3m4", "float", 8, 31.0, exponent=3, mantissa=4, bias=3),
    Codec("e4m3i", "float", 8, 240.0, exponent=4, mantissa=3, bias=7, special="ieee"),
    Codec("e1m2", "float", 4, 1.75, exponent=1, mantissa=2, bias=1),
    Codec("int8u", "integer", 8, 100, offset=True),
    Codec("five", "table", 3, 2.0, levels=(-2.0, -0.3, 0.1, 0.5, 1.25)),
)
"""Codecs that nothing but their facts describes."""
BUILT_IN = [c for c in CODECS.values() if c.scaled and not c.keys]
QUANTS = [
    *(QuantSpec(c.name) for c in (*BUILT_IN, *MINE)),
    *(QuantSpec(c.name, affine=True) for c in (*BUILT_IN, *MINE) if c.integer),
    QuantSpec("table", levels=(-1.0, -0.25, 0.0, 0.7), measure="rms"),
]
each_quant = pytest.mark.parametrize(
    "quant", QUANTS, ids=lambda q: f"{q.format}{'-affine' * q.affine}{'-own' * bool(q.levels)}"
)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered(*MINE):
        yield


@each_quant
def test_every_code_stands_for_its_number(quant: QuantSpec) -> None:
    values = code_values(quant)
    assert len(values) == 1 << quant.fmt.bits
    for code, value in enumerate(values.tolist()):
        number = exact.number(code, quant)
        if number is None:
            assert not np.isfinite(value)
        else:
            assert Fraction(value) == number
    assert max(abs(v) for v in values[np.isfinite(values)]) >= (quant.fmt.qmax or 0) - 1e-6


def test_small_floats_are_those_of_the_standards() -> None:
    for name, kind in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        theirs = torch.arange(256, dtype=torch.uint8).view(kind).double().numpy()
        ours = code_values(QuantSpec(name))
        assert np.array_equal(ours, theirs, equal_nan=True)
        assert np.array_equal(np.signbit(ours)[ours == 0], np.signbit(theirs)[theirs == 0])
    assert code_values(QuantSpec("e2m1")).tolist() == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6,
    ]  # fmt: skip
    assert code_values(QuantSpec("int3")).tolist() == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert code_values(QuantSpec("int2", affine=True)).tolist() == [0, 1, 2, 3]


def around(quant: QuantSpec) -> np.ndarray:
    """Every number of a codec, every middle of two, their neighbours in f32, and what lies outside."""
    numbers = sorted(
        {n for n in (exact.number(c, quant) for c in range(1 << quant.fmt.bits)) if n is not None}
    )
    middles = [(a + b) / 2 for a, b in pairwise(numbers)]
    top = float(numbers[-1])
    odd = [-0.0, 1e-45, -1e-45, 2.0**-126, -(2.0**-127), 2.0**-149 * 12345, 1e-8, -1e-8]
    far = [top * 1.0001 + 1e-6, -top * 1.0001 - 1e-6, top * 1.5, -top * 1.5, 3e38, -3e38]
    x = np.array([*map(float, numbers), *map(float, middles), *odd, *far]).astype(F32)
    return np.concatenate([x, np.nextafter(x, F32(np.inf)), np.nextafter(x, F32(-np.inf))])


@each_quant
def test_numbers_become_the_nearest_code_and_ties_the_even_one(quant: QuantSpec) -> None:
    x = around(quant)
    codes = numbers_to_codes(x, quant)
    wanted = [exact.code(Fraction(float(v)), bool(np.signbit(v)), quant) for v in x]
    assert codes.tolist() == wanted
    values = code_values(quant)
    numbers = np.unique(values[np.isfinite(values)])
    if quant.fmt.kind != "table" and not quant.affine:
        numbers = numbers[np.abs(numbers) <= quant.fmt.qmax]
    error = np.abs(values[codes] - x.astype(np.float64))
    least = np.abs(numbers[:, None] - x.astype(np.float64)).min(axis=0)
    assert (error <= least + 2.0**-22 * np.abs(numbers).max() * (quant.fmt.kind == "table")).all()


@each_quant
def test_every_code_that_is_a_number_comes_back(quant: QuantSpec) -> None:
    codes = np.arange(1 << quant.fmt.bits)
    values = code_values(quant)
    limit = np.inf if quant.affine or quant.fmt.kind == "table" else quant.fmt.qmax
    used = np.isfinite(values) & (np.abs(values) <= limit)
    if quant.fmt.kind == "table":
        used &= codes < len(quant.fmt.levels)
    assert np.array_equal(numbers_to_codes(values.astype(F32), quant)[used], codes[used])


@each_quant
def test_what_is_no_number(quant: QuantSpec) -> None:
    nan, up, down = numbers_to_codes(np.array([np.nan, np.inf, -np.inf], F32), quant).tolist()
    large = numbers_to_codes(np.array([3e38, -3e38], F32), quant).tolist()
    assert [up, down] == large
    zero = numbers_to_codes(np.zeros(1, F32), quant)[0]
    special = quant.fmt.kind == "float" and quant.fmt.special != "none"
    assert nan == ((1 << (quant.fmt.bits - 1)) - 1 if special else zero)
    assert np.isnan(code_values(quant)[nan]) == special


@settings(max_examples=100)
@given(st.lists(st.floats(-57344, 57344, width=32), min_size=1, max_size=60))
def test_fp8_rounds_as_torch_does(numbers: list[float]) -> None:
    x = np.array(numbers, F32)
    for name, kind, top in (("e4m3", torch.float8_e4m3fn, 448), ("e5m2", torch.float8_e5m2, 57344)):
        theirs = torch.from_numpy(x.clip(-top, top)).to(kind).view(torch.uint8).numpy()
        assert np.array_equal(numbers_to_codes(x, QuantSpec(name)), theirs)


@settings(max_examples=100)
@given(st.sampled_from(QUANTS), st.integers(0, 2**32 - 1), st.integers(-12, 12))
def test_any_number_follows_the_rule(quant: QuantSpec, seed: int, power: int) -> None:
    with registered(*(c for c in MINE if c.name not in CODECS)):
        x = (np.random.default_rng(seed).standard_normal(40) * 2.0**power).astype(F32)
        wanted = [exact.code(Fraction(float(v)), bool(np.signbit(v)), quant) for v in x]
        assert numbers_to_codes(x, quant).tolist() == wanted
