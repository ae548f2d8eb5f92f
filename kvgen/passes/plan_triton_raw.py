"""Which keys of a Triton attention kernel are raw, and which specs read codes as numbers at all."""

from __future__ import annotations

from dataclasses import replace

from kvgen.errors import UnsupportedError
from kvgen.ir import Spec
from kvgen.ir.plan import Constant
from kvgen.passes.plan_triton_mask import Mask


def is_valued(spec: Spec) -> bool:
    """Whether attention goes this way."""
    return not (spec.direct("k") and spec.direct("v"))


def check_valued(spec: Spec) -> None:
    """Raise UnsupportedError for what Triton kernels cannot read as numbers."""
    att = spec.attention
    if att.rope is not None and att.rope.stored == "pre":
        raise UnsupportedError(
            'attention.rope.stored = "pre" with codecs that become numbers as they are read: Triton kernels '
            'rotate keys of bf16, f16, f32, int8, int4 and e4m3 only; rope.stored = "post" works'
        )
    if att.pv == "int8":
        raise UnsupportedError(
            'attention.pv = "int8": Triton kernels have no 8-bit weights; use pv = "exact"'
        )
    if att.qk == "int8" and (spec.cache.raw is not None or spec.cache.k.segments):
        raise UnsupportedError(
            'attention.qk = "int8" with raw tokens or segments of cache.k: not all keys are codes; use '
            'qk = "exact"'
        )


def raw_mask(mask: Mask, spec: Spec) -> Mask:
    """The mask of a kernel that reads raw rows in masked tiles only."""
    raw = spec.cache.raw
    if raw is None or mask.never_full:
        return mask
    lo, hi = mask.full_lo, mask.full_hi
    if raw.keep_first:
        lo = "KEEP_FIRST" if lo == "0" else f"tl.maximum({lo}, KEEP_FIRST)"
    hi = "closed_end" if hi == "kv_len" else f"tl.minimum({hi}, closed_end)"
    front = mask.peels_front or raw.keep_first > 0
    return replace(mask, full_lo=lo, full_hi=hi, peels_front=front, coded=True)


def raw_lines(spec: Spec) -> tuple[tuple[str, ...], tuple[Constant, ...], str]:
    """Lines after ``kv_len``, constants, and the condition [T] under which a key is raw."""
    raw = spec.cache.raw
    if raw is None:
        return (), (), ""
    left = "tl.maximum(kv_len - KEEP_LAST, 0)" if raw.keep_last else "kv_len"
    end = f"{left} // RAW_BLOCK * RAW_BLOCK" if raw.block > 1 else left
    constants = (
        [Constant("RAW_BLOCK", raw.block, "tokens that are quantised together")] if raw.block > 1 else []
    )
    if raw.keep_last:
        constants.append(Constant("KEEP_LAST", raw.keep_last, "last tokens that stay unquantised, at least"))
    condition = "key_T >= closed_end"
    if raw.keep_first:
        constants.append(Constant("KEEP_FIRST", raw.keep_first, "first tokens that stay unquantised"))
        condition = f"(key_T < KEEP_FIRST) | ({condition})"
    return (f"closed_end = {end}  # tokens from here on are raw",), tuple(constants), condition
