"""Tiles in which codes are made: every element once, every byte and block where the format has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen.errors import UnsupportedError
from kvgen.ir.quant import QuantSpec, Segment
from kvgen.passes.plan_triton_coded import coded_tile
from kvgen.reference.packing import pack_codes

SHAPES = [
    (size, block)
    for size in (16, 48, 64, 72, 96, 192, 576)
    for block in (None, 1, 16, 32, 48, 64, 96)
    if block is None or (size % block == 0 and block < size)
]


def segment(fmt: str, size: int, block: int | None) -> Segment:
    """A segment with scales for rows, or for blocks of them."""
    own = (("d", block),) if block else ()
    return Segment("k", 0, size, QuantSpec(fmt, (*own, ("head", 1), ("tok", 1))))


def read(text: str, at: Any) -> Any:
    """An index text at each place; no text is true everywhere."""
    found = eval(text, dict.fromkeys(("at", "at_N"), at)) if text else True  # noqa: S307
    return np.broadcast_to(found, at.shape)


@pytest.mark.parametrize("fmt", ["int8", "int4", "int3", "int2"])
def test_elements_blocks_and_bytes_are_the_formats(fmt: str) -> None:
    seen = 0
    for size, block in SHAPES:
        part = segment(fmt, size, block)
        try:
            tile = coded_tile(part)
        except UnsupportedError:
            continue
        seen += 1
        places, blocks = np.arange(tile.width), np.arange(tile.blocks)
        element, exists = read(tile.element("at"), places), read(tile.exists("at"), places)
        assert sorted(element[exists]) == list(range(size))
        first, has = read(tile.first("at"), blocks), read(tile.has_block("at"), blocks)
        assert sorted(first[has]) == list(range(0, size, tile.block))
        own = np.repeat(first, tile.width // tile.blocks)
        assert (own[exists] == element[exists] // tile.block * tile.block).all()
        codes = np.random.default_rng(size).integers(0, 1 << part.quant.fmt.bits, size).astype(np.uint8)
        spread, below, planes = np.where(exists, codes[np.where(exists, element, 0)], 0), 0, part.quant.planes
        packed = pack_codes(codes[None], planes) if len(planes) > 1 or planes[0].packed > 1 else [codes[None]]
        for plane, want in zip(planes, packed, strict=True):
            packing = tile.bytes_of(plane)
            bits = ((spread >> below) & ((1 << plane.bits) - 1)).reshape(plane.packed, packing.width)
            below += plane.bits
            got = (bits << read(packing.shifts, np.arange(plane.packed))[:, None]).sum(0)
            at = np.arange(packing.width)
            byte, there = read(packing.byte("at"), at), read(packing.exists("at"), at)
            assert sorted(byte[there]) == list(range(size // plane.packed))
            assert (got[there] == want[0][byte[there]]).all()
    assert seen >= 10


def test_a_block_that_is_neither_part_of_a_run_nor_several_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"cache\.k\.group\.d = 16.*runs of 24 of 192.*leave d out"):
        coded_tile(segment("int3", 192, 16))
