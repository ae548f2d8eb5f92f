"""Which tokens of a request are kept as they came: the constants that kernels work it out from."""

from __future__ import annotations

from kvgen.ir import Spec
from kvgen.ir.plan import Constant


def raw_constants(spec: Spec) -> tuple[Constant, ...]:
    """``KEEP_FIRST``, ``KEEP_LAST``, ``RAW_BLOCK`` of ``kvgen.ir.RawSpec``; none where none is kept."""
    raw = spec.cache.raw
    if raw is None:
        return ()
    return (
        Constant("KEEP_FIRST", raw.keep_first, "tokens that never become codes"),
        Constant("KEEP_LAST", raw.keep_last, "last tokens that are not codes yet"),
        Constant("RAW_BLOCK", raw.block, "tokens that become codes together"),
    )
