"""What K, V, the attention and the cache together must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.ir import QuantSpec, RopeSpec
from kvgen.ir.codec import CODECS
from kvgen.passes.reading import MISSING, Problems, note

Sides = Mapping[str, QuantSpec | None]
"""K and V; None where a side had a mistake of its own."""


def check_arithmetic(att: dict[str, Any], sides: Sides, cache: dict[str, Any], problems: Problems) -> None:
    """Refuse integer products that the stored codes have no part in."""
    integers = ", ".join(repr(codec.name) for codec in CODECS.values() if codec.integer)
    own = ", ".join(repr(codec.name) for codec in CODECS.values() if codec.integer and codec.fast)
    raw = cache["keep_first"] or cache["keep_last"]
    for key, side in (("qk", "k"), ("pv", "v")):
        quant = sides[side]
        if att[key] != "int8" or quant is None:
            continue
        if quant.segments or not quant.fmt.integer:
            what = "segments" if quant.segments else f"format = {quant.format!r}"
            reason = f"cache.{side}.{what} has no integer codes to multiply"
            note(problems, f"attention.{key}", att[key], reason, f"'exact', or a format of {integers}")
        elif key == "pv" and (raw or not quant.direct):
            reason = (
                "weights of 8 bits meet codes as they lie, without minimum, rotation, outer scale or raw rows"
            )
            note(problems, "attention.pv", att[key], reason, f"'exact', or {own} under f32 scales of rows")


def check_transforms(sides: Sides, rope: RopeSpec | None, alias: bool, problems: Problems) -> None:
    """Refuse transformed or centred K that is also rotated when it is read, or that holds V."""
    quant = sides["k"]
    if quant is None:
        return
    for key, value in (("transform", quant.transform), ("mean", quant.mean)):
        if value and rope is not None and rope.stored == "pre":
            reason = "K is rotated when it is read, which comes before this: the order cannot be changed"
            note(problems, f"cache.k.{key}", value, reason, "attention.rope.stored = 'post', or leave it out")
        if value and alias:
            reason = "V is a part of K's rows, which this changes"
            note(problems, f"cache.k.{key}", value, reason, f"leave {key} out, or give V memory of its own")


def check_raw(cache: dict[str, Any], sides: Sides, problems: Problems) -> None:
    """Refuse raw rows that protect nothing."""
    if any(quant is None for quant in sides.values()):
        return
    quants = [quant for quant in sides.values() if quant is not None]
    coded = any(own.fmt.scaled for quant in quants for own in ([q for _, q in quant.segments] or [quant]))
    for key in ("keep_first", "keep_last"):
        if cache[key] is not MISSING and cache[key] and not coded:
            note(problems, f"cache.{key}", cache[key], "neither K nor V is quantised", f"leave {key} out")
