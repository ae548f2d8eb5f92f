"""What the answers of CPU kernels share: inputs, tiles, chunks of V, fold sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.ir.plan import Constant, Part
from kvgen.passes.address import Address
from kvgen.passes.lower import FoldSite

LOG2E = 1.4426950408889634
"""What turns natural units into those of base 2."""

LANES = {"avx512": 16, "avx2": 8, "portable": 4}
"""f32 lanes of a vector of each ISA row."""

REGISTER_TILE = {"avx512": 16, "avx2": 8, "portable": 8}
"""Accumulators that the inner kernels keep in registers."""


@dataclass(frozen=True)
class Inputs:
    """What the answers of one CPU kernel are made from."""

    spec: Spec
    record: PageRecord
    schedule: Schedule
    target: Target
    variant: str
    addresses: Mapping[str, Address]


Answers = tuple[tuple[Constant, ...], Mapping[str, Any]]
"""The constants of a kernel beside those of every op, and the answers to its template."""


def whole_tile(tokens: int, page: int, step: int = 1) -> int:
    """Keys of a tile near ``tokens`` that is a whole number of pages, or a whole part of one.

    A part is a multiple of ``step``, which divides the page.
    """
    if page <= tokens:
        return tokens // page * page
    return max((part for part in range(step, tokens + 1, step) if page % part == 0), default=step)


def round_up(value: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``value``."""
    return -(-value // step) * step


def v_chunks(width: int, step: int, per_chunk: int) -> list[dict[str, int]]:
    """Cut V's elements into chunks of vectors that fit the registers; the last may have a padded tail."""
    vectors, per_chunk = -(-width // step), max(1, per_chunk)
    chunks = []
    for first in range(0, vectors, per_chunk):
        count = min(per_chunk, vectors - first)
        part = Part(first * step, count * step, min(count * step, width - first * step))
        chunks.append({"start": part.start, "count": count, "tail": part.valid % step})
    return chunks


def run_along_d(record: PageRecord, side: str) -> int:
    """Elements along d that lie side by side in a page."""
    plane = record.plane(side)
    last = plane.axes[-1]
    return last.extent or 1 if last.axis.dim == "d" else 1


def score_scale(fold: FoldSite) -> str:
    """Text of the factor on every score of a head."""
    if fold.site == "score_scale":
        at = "u.head0 + h" if fold.per_head else "0"
        return f"(float)a.score_scale * a.k_scale[{at}]"
    return "(float)a.score_scale"


def v_static(fold: FoldSite, decode: bool, plane: str = "v") -> str:
    """Text of the V scale of the head being finished; empty where V has no static scale."""
    if fold.site != "output":
        return ""
    at = "0" if not fold.per_head else "u.head0 + h" if decode else "u.head0"
    return f"a.{plane}_scale[{at}]"
