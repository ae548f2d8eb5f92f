"""adopt: a cache over buffers that someone else owns, checked plane by plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord, Plane, Spec
from kvgen.runtime import places
from kvgen.runtime.cache import RAW_ROWS, Cache, own_storage, torch_dtype
from kvgen.runtime.given import bind_given


def adopt(
    spec: Spec,
    record: PageRecord,
    *,
    scales: Mapping[str, Any] | None = None,
    means: Mapping[str, Any] | None = None,
    **planes: Any,
) -> Cache:
    """A cache over tensors that someone else owns: ``k=``, ``v=`` and the further planes the spec has.

    Each tensor has the axes of the layout string in order. Strides inside a page must be those of the
    page record; the strides of ``page`` and of axes left of it are free. Where the spec leaves tokens
    unquantised: ``k_raw=``, ``v_raw=`` (raw rows, head, tok, d) and ``raw_rows=`` (num_pages,) int32, the
    raw row of each page or -1. ``scales`` and ``means`` as for ``new_cache``. Raises ``ArgumentError``.
    """
    every = record.planes + record.raw
    names = [plane.name for plane in every] + ([RAW_ROWS] if record.raw else [])
    unknown = sorted(set(planes) - set(names))
    if unknown:
        raise ArgumentError(f"{unknown[0]} = ...: this cache has no such plane; it has {', '.join(names)}")
    missing = [name for name in names if planes.get(name) is None]
    if missing:
        raise ArgumentError(f"{missing[0]}: missing; adopt() needs {', '.join(names)}")
    for plane in every:
        tensor = planes[plane.name]
        places.need_tensor(plane.name, tensor)
        if tensor.dim() != len(plane.axes):
            axes = " ".join(str(placed.axis) for placed in plane.axes)
            raise ArgumentError(f"{plane.name}: shape {tuple(tensor.shape)}, but its axes are '{axes}'")
    counts = {plane.name: planes[plane.name].shape[_page_axis(plane)] for plane in every}
    num_pages = min(counts[plane.name] for plane in record.planes)
    for group, what in ((record.planes, "pages"), (record.raw, "raw rows")):
        count = min((counts[plane.name] for plane in group), default=0)
        for plane in group:
            _check_adopted(plane, planes[plane.name], count, counts, what)
    if record.raw:
        _check_raw_rows(planes[RAW_ROWS], num_pages)
    device = planes["k"].device
    for name in names:
        if planes[name].device != device:
            raise ArgumentError(f"{name}: on {planes[name].device}, but k is on {device}; move one of them")
    for name in names:
        places.need_memory(name, planes[name])
    if device.type == "cpu":
        places.need_apart({name: planes[name] for name in names}, {})
    (given,) = bind_given(spec, scales, means, str(device))
    kept = {name: planes[name] for name in names}
    if device.type == "cpu" and len({t.untyped_storage().data_ptr() for t in kept.values()}) < len(kept):
        kept = {name: own_storage(tensor) for name, tensor in kept.items()}
    stored = {plane.name: kept.pop(plane.name) for plane in record.planes}
    return Cache(spec, record, num_pages, stored | given | kept)


def _check_raw_rows(rows: Any, num_pages: int) -> None:
    import torch

    places.need_tensor(RAW_ROWS, rows)
    if rows.dtype != torch.int32 or tuple(rows.shape) != (num_pages,) or not rows.is_contiguous():
        has = f"{str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)}"
        raise ArgumentError(f"{RAW_ROWS}: {has}; give a contiguous int32 ({num_pages},), -1 for no raw row")


def _page_axis(plane: Plane) -> int:
    return [placed.axis.dim for placed in plane.axes].index("page")


def _check_adopted(plane: Plane, tensor: Any, count: int, counts: Mapping[str, int], what: str) -> None:
    axes = " ".join(str(placed.axis) for placed in plane.axes)
    if tensor.dtype != torch_dtype(plane.dtype):
        raise ArgumentError(f"{plane.name}: dtype {tensor.dtype}, but the spec stores {plane.dtype}")
    want = plane.shape(counts[plane.name])
    if tuple(tensor.shape) != want:
        raise ArgumentError(f"{plane.name}: shape {tuple(tensor.shape)}, but axes '{axes}' need {want}")
    if counts[plane.name] != count:
        raise ArgumentError(f"{plane.name}: {counts[plane.name]} {what}, but another plane has {count}")
    if count < 1:
        raise ArgumentError(f"{plane.name}: no {what}; give at least one")
    if tensor.is_neg():
        raise ArgumentError(f"{plane.name}: a lazily negated view, whose memory differs; use .resolve_neg()")
    inside = 1
    for placed, stride, extent in reversed(list(zip(plane.axes, tensor.stride(), tensor.shape, strict=True))):
        step = placed.stride.fixed // plane.itemsize
        if placed.constant and extent > 1 and stride != step:
            reason = (
                f"stride {stride} of axis {placed.axis}, but the layout puts {step} elements between steps"
            )
            raise ArgumentError(
                f"{plane.name}: {reason}; lay the buffer out so, or change cache.layout or align"
            )
        if not placed.constant and extent > 1 and stride < 1:
            raise ArgumentError(f"{plane.name}: stride {stride} of axis {placed.axis}; steps must go forward")
        inside += (extent - 1) * stride
    outer = [
        (s, e) for p, s, e in zip(plane.axes, tensor.stride(), tensor.shape, strict=True) if not p.constant
    ]
    reach = plane.span() // plane.itemsize
    for stride, extent in sorted(outer):
        if extent > 1 and stride < reach:
            raise ArgumentError(
                f"{plane.name}: stride {stride} is below the {reach} elements it steps over: overlap"
            )
        reach += (extent - 1) * stride
