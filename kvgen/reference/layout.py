"""layout: buffers of bytes <-> logical arrays, by strided views of the page record.

A plane becomes one numpy view ``[page, head, tok_outer, tok_inner, d_outer, d_inner]`` over the
bytes (an unsplit dimension has an inner extent of 1, an absent one 1 and 1), so that rejoining a
split is a reshape. No address is ever computed here; numpy walks the strides.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord
from kvgen.reference.codec import NUMPY, Array

Pools = Mapping[str, Array]
"""Buffers by name (``kv``, or ``k`` and ``v``): uint8 [bytes], contiguous, writable for writers."""


def new_pools(record: PageRecord, num_pages: int, fill: int = 0) -> dict[str, Array]:
    """Fresh buffers for ``num_pages`` pages, every byte set to ``fill``.

    0xff makes every f32, bf16 and f16 a NaN: the poison of the conformance tests.
    """
    return {name: np.full(size.at(num_pages), fill, np.uint8) for name, size in record.pools}


def view(pools: Pools, record: PageRecord, name: str, num_pages: int) -> Array:
    """A plane as a view [page, head, tok_outer, tok_inner, d_outer, d_inner] of its storage type.

    Writing to it writes the buffer. The pages of ``k_raw`` and ``v_raw`` are raw rows, as many as
    ``pools["raw"]`` holds, whatever ``num_pages`` says. Raises ``ArgumentError`` where the buffer is not
    uint8 [bytes] or too small, and ``KeyError`` where the cache has no such plane.
    """
    plane = record.plane(name)
    buffer = pools[plane.pool]
    if plane in record.raw:
        num_pages = buffer.size // record.raw_bytes()
        need = num_pages * record.raw_bytes()
    else:
        need = dict(record.pools)[plane.pool].at(num_pages)
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or buffer.size < need:
        raise ArgumentError(
            f"pool {plane.pool}: expected contiguous uint8 [{need}], got {buffer.dtype} {buffer.shape}"
        )
    steps = {
        a.axis.key: (num_pages if a.extent is None else a.extent, a.stride.at(num_pages)) for a in plane.axes
    }
    shape, strides = [], []
    for dim in ("page", "head"):
        shape.append(steps.get(dim, (1, 0))[0])
        strides.append(steps.get(dim, (1, 0))[1])
    for dim in ("tok", "d"):
        outer = steps.get(dim, steps.get(f"{dim}_outer", (1, 0)))
        inner = steps.get(f"{dim}_inner", (1, 0))
        shape += [outer[0], inner[0]]
        strides += [outer[1], inner[1]]
    if num_pages == 0:  # an offset may then lie past the end of an empty buffer
        return np.empty(shape, NUMPY[plane.dtype])
    return np.ndarray(tuple(shape), NUMPY[plane.dtype], buffer, plane.offset.at(num_pages), tuple(strides))


def raw_view(pools: Pools, record: PageRecord, name: str) -> Array:
    """``k_raw`` or ``v_raw`` as a view [raw row, head, tok, d] of its storage type over ``pools["raw"]``."""
    return view(pools, record, name, 0)[:, :, :, 0, :, 0]


def join(array: Array) -> Array:
    """[page, head, tok_o, tok_i, d_o, d_i] -> [page, head, tok, d] with the splits rejoined (may copy)."""
    pages, heads, to, ti, do, di = array.shape
    return array.reshape(pages, heads, to * ti, do * di)


def unpack(pools: Pools, record: PageRecord, num_pages: int) -> dict[str, Array]:
    """Buffers -> logical copies of every plane: k, v [page, head, tok, d] and scales [page, head, tok] (with
    a last axis of blocks where a row has several).

    Elements keep their storage type (bf16 as uint16 bits); d counts stored elements.
    """
    found = {p.name: join(view(pools, record, p.name, num_pages)).copy() for p in record.planes}
    flat = {p.name for p in record.planes if not any(a.axis.dim == "d" for a in p.axes)}
    return {name: array[..., 0] if name in flat else array for name, array in found.items()}


def pack(
    arrays: Mapping[str, Array], record: PageRecord, num_pages: int, pools: dict[str, Array] | None = None
) -> dict[str, Array]:
    """The inverse of ``unpack``: logical arrays written into ``pools`` (fresh zeros where None).

    Bytes that belong to no element (padding) are left as they are. Raises ``ArgumentError`` where an
    array has not its plane's type or size.
    """
    pools = new_pools(record, num_pages) if pools is None else pools
    for name, array in arrays.items():
        target = view(pools, record, name, num_pages)
        if array.dtype != target.dtype or array.size != target.size:
            raise ArgumentError(
                f"{name}: expected {target.size} of {target.dtype}, got {array.dtype} {array.shape}"
            )
        target[...] = array.reshape(target.shape)
    return pools
