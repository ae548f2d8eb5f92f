"""The PTX that turns codes into operands, executed in numpy over every code: its bits are the tested ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvgen.reference.codec import e4m3_to_f64, unpack_nibbles
from tests.support.specs import make_spec
from tests.support.triton_calls import BACKEND, plan

Words = npt.NDArray[np.uint32]

EVERY = np.arange(1 << 16, dtype=np.uint32)
REGISTERS = EVERY | (EVERY * np.uint32(40503) + np.uint32(12345)) << np.uint32(16)
"""Every pair of bytes in the low half, and all of them again in another order in the high one."""


def f16x2(bits: Words) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(bits, np.uint32).view(np.float16).reshape(-1, 2)


def bits(halves: npt.NDArray[Any]) -> Words:
    return np.ascontiguousarray(halves, np.float16).view(np.uint32).reshape(-1)


def prmt(a: Words, b: Words, selector: int) -> Words:
    source = np.stack([a, b], 1).view(np.uint8).reshape(-1, 8)
    chosen = source[:, [selector >> 4 * i & 7 for i in range(4)]]
    return np.ascontiguousarray(chosen).view(np.uint32).reshape(-1)


def lop3(a: Words, b: Words, c: Words, table: int) -> Words:
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def e4m3x2(pair: Words) -> Words:
    codes = np.stack([pair & 0xFF, pair >> 8 & 0xFF], 1).astype(np.uint8)
    return bits(e4m3_to_f64(codes).astype(np.float16))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "sub.rn.f16x2": lambda a, b: bits(f16x2(a) - f16x2(b)),
    "fma.rn.f16x2": lambda a, b, c: bits(
        f16x2(a).astype(np.float64) * f16x2(b).astype(np.float64) + f16x2(c).astype(np.float64)
    ),
    "abs.f16x2": lambda a: a & np.uint32(0x7FFF7FFF),
    "set.gt.u32.f16x2": lambda a, b: (
        np.where(f16x2(a) > f16x2(b), 0xFFFF, 0).astype(np.uint16).view(np.uint32).reshape(-1)
    ),
    "cvt.rn.f16x2.e4m3x2": e4m3x2,
}


def execute(asm: str, outputs: int) -> list[Words]:
    """The output registers of ``asm`` for REGISTERS as its input."""
    registers: dict[str, Words] = {f"${outputs}": REGISTERS}

    def value(text: str) -> Any:
        if text in registers:
            return registers[text]
        return np.full_like(REGISTERS, int(text, 0))

    for line in filter(None, (part.strip() for part in asm.strip().strip("{}").split(";"))):
        if line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        if halves := re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest):
            registers[halves[1]], registers[halves[2]] = value(halves[3]) & 0xFFFF, value(halves[3]) >> 16
            continue
        target, *operands = re.split(r",\s*", rest)
        if name in ("prmt.b32", "lop3.b32"):
            table = int(operands.pop(), 0)
            step: Callable[..., Words] = prmt if name == "prmt.b32" else lop3
            registers[target] = step(*map(value, operands), table)
        else:
            registers[target] = OPERATIONS[name](*map(value, operands))
    return [registers[f"${i}"] for i in range(outputs)]


def helper(name: str, stored: str, target: str, layout: str = "hnd") -> str:
    """The assembly of one helper of decode's module."""
    text = BACKEND.render(plan("decode", make_spec(stored, stored, layout, group=4, q_dtype="bf16"), target))
    found = re.search(rf'def {name}\(x\):.*?"""(\{{.*?\}})"""', text, re.S)
    assert found is not None
    return found[1]


LOW, HIGH = REGISTERS & 0xFFFF, REGISTERS >> 16
EVEN = np.stack([LOW & 0xFF, HIGH & 0xFF], 1).astype(np.uint8)
ODD = np.stack([LOW >> 8, HIGH >> 8], 1).astype(np.uint8)


def test_int8_words() -> None:
    even, odd = execute(helper("words_to_f16", "int8-token", "sm_90"), 2)
    np.testing.assert_array_equal(f16x2(even), EVEN.view(np.int8))
    np.testing.assert_array_equal(f16x2(odd), ODD.view(np.int8))


def test_int4_words() -> None:
    lanes = execute(helper("nibble_words_to_f16", "int4-token", "sm_90"), 4)
    wanted = [*np.split(unpack_nibbles(EVEN), 2, axis=1), *np.split(unpack_nibbles(ODD), 2, axis=1)]
    for lane, want in zip(lanes, wanted, strict=True):
        np.testing.assert_array_equal(f16x2(lane), want)


def test_int4_bytes_as_sixteen_times_their_codes() -> None:
    low, high = (x.view(np.int8) for x in execute(helper("nibbles_x16", "int4-token", "sm_90"), 2))
    codes = unpack_nibbles(REGISTERS.view(np.uint8)[:, None])
    np.testing.assert_array_equal(low, 16 * codes[:, 0])
    np.testing.assert_array_equal(high, 16 * codes[:, 1])


@pytest.mark.parametrize(("target", "unit"), [("sm_90", 1.0), ("sm_80", 2.0**-8)])
@pytest.mark.parametrize("stored", ["e4m3-token", "e4m3-tensor"])
def test_e4m3_words(stored: str, target: str, unit: float) -> None:
    lanes = execute(helper("e4m3_words_to_f16", stored, target), 2)
    for lane, codes in zip(lanes, (EVEN, ODD), strict=True):
        want = e4m3_to_f64(codes) * unit
        if stored == "e4m3-token" and target == "sm_80":  # computed scales: a code is never NaN
            want = np.where(np.isnan(want), f16x2(lane), want)
        np.testing.assert_array_equal(f16x2(lane), want)


@pytest.mark.parametrize(("target", "unit"), [("sm_90", 1.0), ("sm_80", 2.0**-8)])
def test_e4m3_bytes_whose_neighbours_lie_elsewhere(target: str, unit: float) -> None:
    halves = execute(helper("e4m3_to_f16", "e4m3-tensor", target, "columns"), 2)
    codes = REGISTERS.view(np.uint8).reshape(-1, 2, 2)
    for half, pair in zip(halves, (codes[:, 0], codes[:, 1]), strict=True):
        np.testing.assert_array_equal(f16x2(half), e4m3_to_f64(pair) * unit)
