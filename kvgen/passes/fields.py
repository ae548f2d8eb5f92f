"""The fields of a spec file, one rule each: type, range, default, and what to say when it is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvgen.ir.attention import PARAM_DIMS, PARAM_TYPES
from kvgen.ir.codec import CODECS
from kvgen.ir.quant import SCALE_DTYPES, SCALE_PLACES
from kvgen.ir.rope import PAIRINGS, STORED
from kvgen.names import FORMAT, layout_of, suggest

REQUIRED: Final = object()
LABEL: Final = r"[\w .,:+@()/=-]{1,100}"


@dataclass(frozen=True)
class Check:
    """One rule for a value, and the same rule in the words of JSON Schema."""

    refuse: Callable[[Any], str | None]
    """Returns why a value is wrong, or None."""
    schema: Mapping[str, Any]
    """What an editor may know of the rule."""
    near: Callable[[Any], tuple[Any, ...]] = lambda value: ()
    """Values like a wrong one that might be meant; those that are wrong themselves are left out."""

    def __call__(self, value: Any) -> str | None:
        """Why ``value`` is wrong, or None."""
        return self.refuse(value)


@dataclass(frozen=True)
class Field:
    """How one key of a table is read."""

    check: Check
    """The rule for its value."""
    hint: str
    """What would work."""
    default: Any = REQUIRED
    """Value when absent; REQUIRED makes absence a mistake."""
    advice: Callable[[Any, Any], str] | None = None
    """More to say about a wrong number and the one above it that works."""


def integer(low: int, high: int, step: int = 1) -> Check:
    """An integer of a range, and a multiple of ``step``."""

    def refuse(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return "not an integer"
        if not low <= value <= high:
            return f"outside {low} to {high}"
        return None if value % step == 0 else f"not a multiple of {step}"

    def near(value: Any) -> tuple[int, ...]:
        if type(value) is float and value.is_integer():
            return (int(value),)
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}", value):
            return (int(value),)
        return (value // step * step, -(-value // step) * step) if type(value) is int else ()

    multiple = {"multipleOf": step} if step > 1 else {}
    return Check(refuse, {"type": "integer", "minimum": low, "maximum": high, **multiple}, near)


def one_of(*names: str) -> Check:
    """One of some names."""

    def near(value: Any) -> tuple[str, ...]:
        meant = suggest(value, names, FORMAT)
        return () if meant is None else (meant,)

    return Check(
        lambda value: None if isinstance(value, str) and value in names else "not one of the choices",
        {"type": "string", "enum": list(names)},
        near,
    )


def kind_of(kind: type, word: str, schema: str) -> Check:
    """A value of a Python type."""
    return Check(lambda value: None if isinstance(value, kind) else f"not {word}", {"type": schema})


def _power_of_two(bits: int) -> Check:
    choices = [1 << bit for bit in range(bits + 1)]

    def refuse(value: Any) -> str | None:
        reason = integer(1, choices[-1])(value)
        return reason or (None if value in choices else "not a power of two")

    def near(value: Any) -> tuple[int, ...]:
        if type(value) is not int or not 1 < value < choices[-1]:
            return ()
        return 1 << value.bit_length() - 1, 1 << value.bit_length()

    return Check(refuse, {"type": "integer", "enum": choices}, near)


def pattern(regex: str, what: str) -> Check:
    """A string that matches an expression from its first character to its last."""

    def refuse(value: Any) -> str | None:
        if not isinstance(value, str):
            return "not a string"
        return None if re.fullmatch(regex, value) else f"not {what}"

    return Check(refuse, {"type": "string", "pattern": f"^{regex}$"})


def number(low: float, high: float) -> Check:
    """A number of a range."""

    def refuse(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "not a number"
        return None if low <= value <= high else f"outside {low:g} to {high:g}"

    return Check(refuse, {"type": "number", "minimum": low, "maximum": high})


def _factor(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number"
    # Kernels multiply in f32. Comparing, unlike float(), takes an integer of any size; a NaN fails it.
    return None if 2.0**-126 <= value < 2.0**127 else "not a positive finite number of the f32 range"


def text(most: int) -> Check:
    """A string of at most so many characters."""

    def refuse(value: Any) -> str | None:
        return "not a string" if not isinstance(value, str) else None if len(value) <= most else "too long"

    return Check(refuse, {"type": "string", "maxLength": most})


# It ends up in comments of generated sources, which it must not be able to close or continue.
_LABEL = pattern(LABEL, "a short line of letters, digits, spaces and . , : + @ ( ) / = -")
SWITCH = kind_of(bool, "a boolean", "boolean")
FACTOR = Check(_factor, {"type": "number", "exclusiveMinimum": 0})
"""A positive number of the f32 range."""
EXPRESSION = pattern(r"[ -~]{1,500}", "one line of at most 500 characters of ASCII")
# Messages quote a layout several times; no layout has more than 13 axes.
MOST_LAYOUT = 200
"""Characters of a layout string."""
_LAYOUT = replace(text(MOST_LAYOUT), near=lambda value: (layout_of(value),))
TABLE = kind_of(Mapping, "a table", "object")


def _padded(value: Any, high: Any) -> str:
    """How rows of ``value`` elements go through kernels for ``high``: products with zeros change nothing."""
    return f": pad q, k and v with zeros to {high} elements and set scale = {value**-0.5:.8g}"


def choices(*names: str) -> str:
    """The hint of a field that takes one of some names."""
    return f"{CHOICES}{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"


CHOICES: Final = "the choices are "

TOP = {
    "name": Field(_LABEL, "for example 'llama 8B'", "unnamed"),
    "attention": Field(TABLE, "an [attention] table"),
    "cache": Field(TABLE, "a [cache] table"),
}
ATTENTION = {
    "q_heads": Field(integer(1, 65536), "for example 32"),
    "kv_heads": Field(integer(1, 4096), "for example 8"),
    "head_dim": Field(integer(16, 576, 8), "a multiple of 8 from 16 to 576", advice=_padded),
    "v_head_dim": Field(integer(16, 576, 8), "a multiple of 8 from 16 to 576", None),
    "q_dtype": Field(one_of("bf16", "f16", "f32"), choices("bf16", "f16", "f32"), "bf16"),
    "scale": Field(FACTOR, "leave it out for head_dim ** -0.5", None),
    "causal": Field(SWITCH, "true or false", True),
    "window": Field(integer(0, 2**31 - 1), "earlier keys to keep, or leave it out", None),
    "qk": Field(one_of("exact", "int8"), choices("exact", "int8"), "exact"),
    "pv": Field(one_of("exact", "int8"), choices("exact", "int8"), "exact"),
    "params": Field(TABLE, 'for example slope = { dims = ["head"], dtype = "f32" }', None),
    "rope": Field(TABLE, "an [attention.rope] table, or leave it out", None),
}
"""Keys of [attention] beside those of registered masks, scores and sinks (``kvgen.variants``)."""
PARAM = {
    "dims": Field(kind_of(list, "a list", "array"), f"a list of names out of {', '.join(PARAM_DIMS)}"),
    "dtype": Field(one_of(*PARAM_TYPES), choices(*PARAM_TYPES), "f32"),
}
ROPE = {
    "kind": Field(text(100), "'default', 'linear', 'llama3' or 'yarn'", "default"),
    "pairing": Field(one_of(*PAIRINGS), choices(*PAIRINGS), "half"),
    "dim": Field(integer(2, 576, 2), "rotated elements, an even number; leave it out for head_dim", None),
    "theta": Field(number(1.0, 2.0**100), "for example 10000.0", 10000.0),
    "stored": Field(one_of(*STORED), choices(*STORED), "post"),
}
"""Keys of [attention.rope] that every position scheme has."""
CACHE = {
    "page_size": Field(integer(1, 4096), "for example 16"),
    "layout": Field(
        _LAYOUT, "'fast' (the target's own) or for example 'page kv head tok d'", "page kv head tok d"
    ),
    "align": Field(_power_of_two(12), "a power of two from 1 to 4096", 64),
    "keep_first": Field(integer(0, 2**20), "tokens that are never quantised, for example 4", 0),
    "keep_last": Field(integer(0, 2**20), "last tokens that are not quantised yet, for example 32", 0),
    "k": Field(TABLE, "a [cache.k] table"),
    "v": Field(TABLE, "a [cache.v] table"),
}
ALIAS = {"alias": Field(one_of("k"), "'k': V is the first v_head_dim elements of K's rows")}


GROUP_KEYS = {
    dim: Field(integer(1, 4096), f"a block along {dim}, for example 1", None) for dim in ("tok", "head", "d")
}


def quant_fields() -> dict[str, Field]:
    """Keys of [cache.k] and [cache.v], registered codecs included."""
    return {
        "format": Field(one_of(*CODECS), choices(*CODECS)),
        "group": Field(TABLE, "for example { tok = 1, head = 1 }", None),
        "scale_dtype": Field(one_of(*SCALE_DTYPES), choices(*SCALE_DTYPES), "f32"),
        "affine": Field(SWITCH, "true (scale * code + min) or false", False),
        "outer": Field(TABLE, "{} (one more f32 scale for all) or { head = 1 }", None),
        "scales": Field(one_of(*SCALE_PLACES), choices(*SCALE_PLACES), "page"),
        "transform": Field(one_of("hadamard"), "'hadamard', or leave it out", None),
        "mean": Field(SWITCH, "true (subtract a given mean) or false", False),
        "levels": Field(kind_of(list, "a list", "array"), "3 to 16 ascending numbers", None),
        "measure": Field(one_of("amax", "rms"), choices("amax", "rms"), None),
        "layout": Field(_LAYOUT, "the axes right of kv, for example 'head d/8 tok d%8'", None),
    }
