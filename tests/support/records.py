"""Brute force over page records: the byte of every element, one index after another."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgen.ir import PageRecord, Plane


def byte_of(plane: Plane, num_pages: int) -> Any:
    """int64 [page, head, tok, d]: the first byte of every element, one index after another.

    Where one scale serves a block of d, the d axis counts blocks.
    """
    sizes = {"page": num_pages, "head": 1, "tok": 1, "d": 1}
    inner = {a.axis.dim for a in plane.axes if a.axis.part == "inner"}
    for a in plane.axes:
        if a.extent is not None:
            sizes[a.axis.dim] *= a.extent
    at = np.meshgrid(*(np.arange(n) for n in sizes.values()), indexing="ij")
    index = dict(zip(sizes, at, strict=True))
    total = np.full(at[0].shape, plane.offset.at(num_pages))
    for a in plane.axes:
        along = index[a.axis.dim]
        blocks = a.axis.part == "outer" and a.axis.dim not in inner
        total += (along if blocks else a.axis.index(along)) * a.stride.at(num_pages)
    return total


def assert_disjoint(record: PageRecord, num_pages: int) -> None:
    """Every byte of every pool belongs to at most one element, and no element lies outside."""
    for pool, size in record.pools:
        used = np.zeros(size.at(num_pages), np.uint8)
        for plane in record.planes:
            if plane.pool != pool:
                continue
            first = byte_of(plane, num_pages).ravel()
            every = (first[:, None] + np.arange(plane.itemsize)).ravel()
            assert every.min() >= 0 and every.max() < len(used), plane.name
            np.add.at(used, every, 1)
        assert used.max() == 1, pool
