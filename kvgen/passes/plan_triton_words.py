"""A plane of bytes seen as int16 words: two neighbours of a row in one loaded element."""

from __future__ import annotations

from dataclasses import replace

from kvgen.ir import Plane
from kvgen.passes.address import Address, address, plane_facts, simplify


def word_plane(plane: Plane) -> Plane | None:
    """The plane of byte pairs seen as two-byte words, None where pairs do not lie together and aligned."""
    if plane.itemsize != 1:
        return None
    axes = []
    for placed in plane.axes:
        axis = placed.axis
        stride = placed.stride
        if axis.dim == "d":
            if axis.part != "outer":
                if stride.fixed != 1 or stride.per_page:
                    return None
                stride = replace(stride, fixed=2)
            if placed.extent is None or axis.block % 2:
                return None
            halves = placed.extent if axis.part == "outer" else placed.extent // 2
            placed = replace(placed, axis=replace(axis, block=axis.block // 2), extent=halves, stride=stride)
        if stride.fixed % 2 or stride.per_page % 2:
            return None
        axes.append(placed)
    if plane.offset.fixed % 2 or plane.offset.per_page % 2:
        return None
    return replace(plane, dtype="f16", axes=tuple(axes))  # f16: the type of two bytes that strides count in


def word_address(plane: Plane) -> Address:
    """The address of a word plane: ``d`` counts words, strides are in words."""
    return simplify(address(plane), plane_facts(plane))
