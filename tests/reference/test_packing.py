"""Where the bits of codes lie, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.ir import QuantSpec
from kvgen.reference.packing import pack_codes, unpack_codes

WIDTHS = (16, 64, 96)
PACKED = ("int4", "int3", "int2", "e2m1", "lloyd2", "lloyd3", "lloyd4", "table")


def bit(codes: list[int], element: int, number: int) -> int:
    return codes[element] >> number & 1


def wanted(codes: list[int], bits: int) -> list[list[int]]:
    """The bytes of each plane, from the words of ``QuantSpec.planes``."""
    width = len(codes)
    low = 2 if bits == 3 else bits
    part = width // (8 // low)
    planes = [
        [
            sum(bit(codes, j + i * part, b) << (low * i + b) for i in range(8 // low) for b in range(low))
            for j in range(part)
        ]
    ]
    if bits == 3:
        fourth, eighth = width // 4, width // 8
        planes.append(
            [
                sum(
                    bit(codes, q * fourth + j, 2) << q | bit(codes, q * fourth + eighth + j, 2) << (4 + q)
                    for q in range(4)
                )
                for j in range(eighth)
            ]
        )
    return planes


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("fmt", PACKED)
def test_each_bit_lies_where_the_format_says(fmt: str, width: int) -> None:
    planes, bits = QuantSpec(fmt).planes, QuantSpec(fmt).fmt.bits
    codes = np.random.default_rng(width).integers(0, 1 << bits, (5, width)).astype(np.uint8)
    stored = pack_codes(codes, planes)
    assert len(stored) == len(planes) == (2 if bits == 3 else 1)
    for row in range(5):
        assert [plane[row].tolist() for plane in stored] == wanted(codes[row].tolist(), bits)
    assert np.array_equal(unpack_codes(stored, planes), codes)


@pytest.mark.parametrize("fmt", PACKED)
def test_every_byte_is_read_and_written_back(fmt: str) -> None:
    planes = QuantSpec(fmt).planes
    stored = [
        np.tile(np.arange(256, dtype=np.uint8), 2 // n + 1)[: 512 // n] for n in range(1, 1 + len(planes))
    ]
    again = pack_codes(unpack_codes(stored, planes), planes)
    assert all(np.array_equal(a, b) for a, b in zip(stored, again, strict=True))
