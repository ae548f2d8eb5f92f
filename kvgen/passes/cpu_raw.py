"""Which tokens of a request are left unquantised: the constants from which kernels work it out."""

from __future__ import annotations

from kvgen.ir import Spec
from kvgen.ir.plan import Constant


def raw_constants(spec: Spec) -> tuple[Constant, ...]:
    """``KEEP_FIRST``, ``KEEP_LAST``, ``RAW_BLOCK`` of ``kvgen.ir.RawSpec``; none where none is kept."""
    raw = spec.cache.raw
    if raw is None:
        return ()
    return (
        Constant("KEEP_FIRST", raw.keep_first, "tokens that are never quantised"),
        Constant("KEEP_LAST", raw.keep_last, "last tokens that are not quantised yet"),
        Constant("RAW_BLOCK", raw.block, "tokens that are quantised together"),
    )
