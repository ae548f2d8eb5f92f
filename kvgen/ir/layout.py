"""LayoutSpec: the order of axes in memory, written the way einops writes them.

    layout := axis (" " axis)*                 outermost first
    axis   := dim | dim "/" block | dim "%" block
    dim    := "page" | "kv" | "head" | "tok" | "d"

``"page kv head tok d"`` is HND inside one page record; ``"page kv tok head d"`` is NHD;
``"kv page tok head d"`` is vLLM's two-half buffer; ``"page head d/8 tok d%8"`` is the
x-packed K of vLLM and FlashInfer. ``dim/b ... dim%b`` splits a dimension into an outer axis
of ``extent // b`` and an inner axis of ``b``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DIMS = ("page", "kv", "head", "tok", "d")
"""Every dimension a layout string may name."""

SPLITTABLE = ("tok", "d")
"""Dimensions that may be split into an outer and an inner axis."""

_AXIS = re.compile(r"(?P<dim>[a-z]+)(?:(?P<op>[/%])(?P<block>[0-9]+))?")


class LayoutError(ValueError):
    """A layout string that is not one; the message quotes the string and marks the axis."""


@dataclass(frozen=True)
class Axis:
    """One axis of memory: a whole dimension, or one half of a split one."""

    dim: str
    """Logical dimension: ``page``, ``kv``, ``head``, ``tok`` or ``d``."""
    part: str = "whole"
    """``whole``, ``outer`` (``dim/b``) or ``inner`` (``dim%b``)."""
    block: int = 0
    """Block of a split dimension; 0 for a whole one."""

    @classmethod
    def read(cls, text: str) -> Axis:
        """The inverse of ``str``, for text that ``str`` wrote."""
        for mark, part in (("/", "outer"), ("%", "inner")):
            dim, found, block = text.partition(mark)
            if found:
                return cls(dim, part, int(block))
        return cls(text)

    def extent(self, size: int) -> int:
        """Number of steps along this axis when the dimension has ``size`` elements."""
        if self.part == "whole":
            return size
        return self.block if self.part == "inner" else size // self.block

    def index(self, value: int) -> int:
        """Position on this axis of logical index ``value`` (plain integers; used by tests)."""
        if self.part == "whole":
            return value
        return value % self.block if self.part == "inner" else value // self.block

    @property
    def key(self) -> str:
        """A name usable in generated code: ``tok``, ``d_outer``, ``d_inner``."""
        return self.dim if self.part == "whole" else f"{self.dim}_{self.part}"

    def __str__(self) -> str:
        mark = {"whole": "", "outer": "/", "inner": "%"}[self.part]
        return f"{self.dim}{mark}{self.block}" if mark else self.dim


@dataclass(frozen=True)
class LayoutSpec:
    """Axes outermost first. Strides, padding and offsets are derived by ``passes.place``."""

    axes: tuple[Axis, ...]

    @classmethod
    def parse(cls, text: str) -> LayoutSpec:
        """Read a layout string; ``LayoutError`` quotes the string and points at the axis."""
        axes: list[Axis] = []
        for word in text.split():
            match = _AXIS.fullmatch(word)
            if match is None:
                raise LayoutError(_mark(text, word, "is not an axis: write dim, dim/block or dim%block"))
            dim, op, block = match["dim"], match["op"], int(match["block"] or 0)
            if dim not in DIMS:
                raise LayoutError(
                    _mark(text, word, f"names no dimension; the dimensions are {' '.join(DIMS)}")
                )
            if op and dim not in SPLITTABLE:
                raise LayoutError(_mark(text, word, f"splits {dim}; only tok and d can be split"))
            if op and block < 2:
                raise LayoutError(_mark(text, word, "has a block below 2, which splits nothing"))
            axes.append(Axis(dim, {None: "whole", "/": "outer", "%": "inner"}[op], block))
        _check_axes(text, axes)
        return cls(tuple(axes))

    def dims(self) -> frozenset[str]:
        """The logical dimensions this layout names."""
        return frozenset(axis.dim for axis in self.axes)

    def position(self, dim: str) -> int:
        """Index of the first axis of ``dim``; ``ValueError`` when it is absent."""
        return [axis.dim for axis in self.axes].index(dim)

    def split(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """Axes left and right of the record axis ``kv`` (everything is right where it is absent)."""
        if "kv" not in self.dims():
            return (), self.axes
        at = self.position("kv")
        return self.axes[:at], self.axes[at + 1 :]

    def __str__(self) -> str:
        return " ".join(map(str, self.axes))


def _check_axes(text: str, axes: list[Axis]) -> None:
    if not axes:
        raise LayoutError("an empty layout; write for example 'page kv head tok d'")
    for dim in dict.fromkeys(axis.dim for axis in axes):
        parts = [axis for axis in axes if axis.dim == dim]
        kinds = [axis.part for axis in parts]
        if kinds == ["whole"]:
            continue
        if "whole" in kinds or len(parts) > 2 or len(set(kinds)) != len(kinds):
            raise LayoutError(_mark(text, str(parts[-1]), f"names {dim} again: two axes would overlap"))
        if len(parts) == 1:
            other = f"{dim}%{parts[0].block}" if kinds == ["outer"] else f"{dim}/{parts[0].block}"
            raise LayoutError(
                _mark(text, str(parts[0]), f"is half of a split; its other half {other} is missing")
            )
        if parts[0].block != parts[1].block:
            raise LayoutError(_mark(text, str(parts[1]), f"splits {dim} by another block than {parts[0]}"))
        if kinds != ["outer", "inner"]:
            raise LayoutError(
                _mark(text, str(parts[0]), f"stands left of {parts[1]}: write the outer half first")
            )


def _mark(text: str, word: str, reason: str) -> str:
    at = text.rfind(word)
    return f"in layout {text!r}, axis {word!r} (column {at + 1}) {reason}"
