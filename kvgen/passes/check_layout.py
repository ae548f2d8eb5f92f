"""The layout strings of a spec: what an axis order must name, and where it may be cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvgen.ir import LayoutError, LayoutSpec
from kvgen.ir.layout import Axis
from kvgen.ir.quant import Segment
from kvgen.names import layout_of
from kvgen.passes.reading import MISSING, Problems, note


def read_layout(text: Any, path: str, problems: Problems) -> LayoutSpec | None:
    """The axes of a layout string; None where it is absent or wrong."""
    if text is MISSING or text is None:
        return None
    try:
        return LayoutSpec.parse(text)
    except LayoutError as error:
        meant = _meant(text, whole=path == "cache.layout")
        hint = f"did you mean {meant!r}?" if meant else ""
        note(problems, path, text, str(error), hint, works=(meant,) if meant else ())
    return None


def _meant(text: str, *, whole: bool) -> str | None:
    """The layout that an engine's way of writing one stands for; ``whole``: of pages, not of one side."""
    try:
        axes = LayoutSpec.parse(layout_of(text) or "").axes
    except LayoutError:
        return None
    if not whole:
        axes = tuple(axis for axis in axes if axis.dim not in ("page", "kv"))
    complete = {axis.dim for axis in axes} >= {"head", "tok", "d", *(("page",) if whole else ())}
    return _join(axes) if complete else None


def check_dims(layout: LayoutSpec, own: dict[str, LayoutSpec | None], problems: Problems) -> None:
    """Refuse layouts that leave a dimension out, or put one where a row would be scattered."""
    missing = [dim for dim in ("page", "head", "tok", "d") if dim not in layout.dims()]
    if missing:
        reason = f"has no axis for {' and '.join(missing)}"
        whole = _complete(layout)
        note(problems, "cache.layout", str(layout), reason, f"write {whole!r}", works=(whole,))
        return
    outer, inner = layout.split()
    if any(axis.dim == "d" for axis in outer):
        reason = "kv stands inside d: K and V rows would interleave element by element"
        rest = [axis for axis in layout.axes if axis.dim != "kv"]
        at = [axis.dim for axis in rest].index("d")
        moved = _join((*rest[:at], Axis("kv"), *rest[at:]))
        hint = f"move kv left of every d axis: {moved!r}"
        note(problems, "cache.layout", str(layout), reason, hint, works=(moved,))
    _check_page(layout, "cache.layout", problems)
    need = {axis.dim for axis in inner}
    for side, spec in own.items():
        if spec is None:
            continue
        path = f"cache.{side}.layout"
        if spec.dims() != need:
            reason = "must name exactly the dimensions right of kv in cache.layout (all where it has no kv)"
            note(problems, path, str(spec), reason, f"'{_join(inner)}' works", works=(_join(inner),))
        else:
            _check_page(spec, path, problems)


def _check_page(layout: LayoutSpec, path: str, problems: Problems) -> None:
    if {"page", "d"} <= layout.dims() and layout.position("page") > layout.position("d"):
        reason = "page stands right of a d axis: a token's row would be scattered over the whole pool"
        rest = tuple(axis for axis in layout.axes if axis.dim != "page")
        moved = _join((Axis("page"), *rest))
        hint = f"move page left of every d axis: '{moved}'"
        note(problems, path, str(layout), reason, hint, works=(moved,))


def _complete(layout: LayoutSpec) -> str:
    """The layout with its missing axes put where they belong: page first, head and tok before d."""
    axes = list(layout.axes)
    dims = [axis.dim for axis in axes]
    at = dims.index("d") if "d" in dims else len(axes)
    axes[at:at] = [Axis(dim) for dim in ("head", "tok") if dim not in dims]
    front = [] if "page" in dims else [Axis("page")]
    back = [] if "d" in dims else [Axis("d")]
    return _join((*front, *axes, *back))


def _join(axes: tuple[Axis, ...]) -> str:
    return " ".join(map(str, axes))


def check_splits(
    side: str,
    layout: LayoutSpec,
    own: LayoutSpec | None,
    page_size: Any,
    width: str,
    parts: tuple[Segment, ...],
    inline: bool,
    problems: Problems,
) -> None:
    """Refuse splits that do not divide their dimension, in each plane of codes, and cuts of whole rows.

    ``width`` is the name of the key that holds the elements of a row; ``inline``: whether scales lie in it.
    """
    outer, inner = layout.split()
    axes = outer + (own.axes if own else inner)
    path = "cache.layout" if own is None else f"cache.{side}.layout"
    bytes_of = [(p.size // c.packed, c.packed) for p in parts for _, c in p.codes]
    sizes = [("tok", page_size, "page_size")]
    sizes += [
        ("d", n, width if packed == 1 else f"{width} / {packed} (bytes of a row)") for n, packed in bytes_of
    ]
    for dim, size, name in sizes:
        halves = [axis for axis in axes if axis.dim == dim and axis.part != "whole"]
        if not halves:
            continue
        at = f"cache.{side}.layout" if own and halves[-1] in own.axes else "cache.layout"
        text = str(own if at != "cache.layout" else layout)
        if len(halves) != 2:
            note(problems, at, text, f"splits {dim} across kv with only one half for {side}")
        elif dim == "d" and len(parts) > 1:
            note(problems, at, text, f"splits d, whose segments are whole rows on {side}", "leave d whole")
        elif size is not MISSING and size % halves[0].block:
            blocks = [b for b in range(2, size + 1) if size % b == 0]
            near = min(blocks, key=lambda b: abs(b - halves[0].block), default=0)
            reason = f"splits {dim} by {halves[0].block}, which does not divide {name} = {size}"
            hint = f"{dim}/{near} ... {dim}%{near} works" if near else f"{dim} cannot be split here"
            cut = (own if at != "cache.layout" else layout) or layout
            moved = (replace(a, block=near) if a in halves else a for a in cut.axes)
            note(problems, at, text, reason, hint, works=(_join(tuple(moved)),) if near else ())
    if inline and axes[-1:] != (Axis("d"),):
        reason = f"scales of {side} lie behind the codes of each row, so d must be whole and innermost"
        note(problems, path, str(own or layout), reason, "end the layout with d, or scales = 'page'")
