"""preset: ``layout = "fast"`` -> the layout strings that a target reads fastest.

CPU (measured, see docs/performance.md): vectors hold tokens, so that scores need no horizontal sums, and K
and V lie as the dot instructions want their operands: two bf16 or four int8 codes along the contracted axis.
Pages that are no whole number of vectors keep rows. GPU (read from machine code): rows of d, scales in planes
of their own, for every format; a tensor core's operands are made from rows on the way.
"""

from __future__ import annotations

from dataclasses import replace

from kvgen.errors import Diagnostic, SpecError
from kvgen.ir import LayoutSpec, Spec, Target

VECTOR_TOKENS = 16
"""Tokens of the widest vector of f32 scores: a page of whole vectors can be read in place by every row."""

CPU_FAST: dict[str, tuple[str, str]] = {
    "f32": ("head d tok", "head tok d"),
    "f16": ("head d tok", "head tok d"),
    "e4m3": ("head d tok", "head tok d"),
    "bf16": ("head tok d", "head tok d"),
    "int8": ("head d/4 tok d%4", "head tok/4 d tok%4"),
    "int4": ("head d/4 tok d%4", "head tok/4 d tok%4"),
}
"""Inner axes of K and of V on a CPU, by format."""


def resolve(spec: Spec, target: Target) -> Spec:
    """``spec`` with its preset replaced by the target's layout; itself where it has none.

    Raises ``SpecError`` where the spec is for another kind of layout than the preset can give.
    """
    cache = spec.cache
    if cache.preset is None:
        return spec
    if cache.preset != "fast":
        raise SpecError([Diagnostic("cache.layout", cache.preset, "no such preset", "'fast'")])
    sides = {}
    for side in ("k", "v"):
        quant = cache.quant(side)
        # Rows serve K and the V inside them alike, and codes that become numbers as they are read.
        known = spec.direct(side) and not cache.alias
        inner = CPU_FAST[quant.format][side == "v"] if known else "head tok d"
        rows = target.backend != "cpu" or cache.page_size % VECTOR_TOKENS or inner == "head tok d"
        sides[side] = replace(quant, layout=None if rows else LayoutSpec.parse(inner))
    return replace(spec, cache=replace(cache, preset=None, k=sides["k"], v=sides["v"]))
