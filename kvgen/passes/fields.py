"""The fields of a spec file, one rule each: type, range, default, and what to say when it is wrong."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvgen.errors import Diagnostic, brief
from kvgen.ir.attention import PARAM_DIMS, PARAM_TYPES
from kvgen.ir.codec import CODECS
from kvgen.ir.quant import SCALE_DTYPES, SCALE_PLACES
from kvgen.ir.rope import PAIRINGS, STORED

Problems = list[Diagnostic]


class _Missing:
    """Stands for a field whose value was absent or wrong (the mistake is already recorded)."""

    def __repr__(self) -> str:
        return "(missing)"


MISSING: Final = _Missing()
REQUIRED: Final = object()
MOST_UNKNOWN: Final = 50
"""Unknown keys of a table that are named one by one."""
LABEL: Final = r"[\w .,:+@()/=-]{1,100}"


@dataclass(frozen=True)
class Check:
    """One rule for a value, and the same rule in the words of JSON Schema."""

    refuse: Callable[[Any], str | None]
    """Returns why a value is wrong, or None."""
    schema: Mapping[str, Any]
    """What an editor may know of the rule."""

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


def integer(low: int, high: int, step: int = 1) -> Check:
    """An integer of a range, and a multiple of ``step``."""

    def refuse(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return "not an integer"
        if not low <= value <= high:
            return f"outside {low} to {high}"
        return None if value % step == 0 else f"not a multiple of {step}"

    multiple = {"multipleOf": step} if step > 1 else {}
    return Check(refuse, {"type": "integer", "minimum": low, "maximum": high, **multiple})


def one_of(*names: str) -> Check:
    """One of some names."""
    return Check(
        lambda value: None if isinstance(value, str) and value in names else "not one of the choices",
        {"type": "string", "enum": list(names)},
    )


def kind_of(kind: type, word: str, schema: str) -> Check:
    """A value of a Python type."""
    return Check(lambda value: None if isinstance(value, kind) else f"not {word}", {"type": schema})


def _power_of_two(bits: int) -> Check:
    choices = [1 << bit for bit in range(bits + 1)]

    def refuse(value: Any) -> str | None:
        reason = integer(1, choices[-1])(value)
        return reason or (None if value in choices else "not a power of two")

    return Check(refuse, {"type": "integer", "enum": choices})


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
SWITCH = kind_of(bool, "true or false", "boolean")
FACTOR = Check(_factor, {"type": "number", "exclusiveMinimum": 0})
"""A positive number of the f32 range."""
EXPRESSION = pattern(r"[ -~]{1,500}", "one line of at most 500 characters of ASCII")
# Messages quote a layout several times; no layout has more than 13 axes.
MOST_LAYOUT = 200
"""Characters of a layout string."""
_LAYOUT = text(MOST_LAYOUT)
TABLE = kind_of(Mapping, "a table", "object")

TOP = {
    "name": Field(_LABEL, "for example 'llama 8B'", "unnamed"),
    "attention": Field(TABLE, "an [attention] table"),
    "cache": Field(TABLE, "a [cache] table"),
}
ATTENTION = {
    "q_heads": Field(integer(1, 65536), "for example 32"),
    "kv_heads": Field(integer(1, 4096), "for example 8"),
    "head_dim": Field(integer(16, 576, 8), "a multiple of 8 from 16 to 576"),
    "v_head_dim": Field(integer(16, 576, 8), "a multiple of 8 from 16 to 576", None),
    "q_dtype": Field(one_of("bf16", "f16", "f32"), "'bf16', 'f16' or 'f32'", "bf16"),
    "scale": Field(FACTOR, "leave it out for head_dim ** -0.5", None),
    "causal": Field(SWITCH, "true or false", True),
    "window": Field(integer(0, 2**31 - 1), "earlier keys to keep, or leave it out", None),
    "qk": Field(one_of("exact", "int8"), "'exact' or 'int8'", "exact"),
    "pv": Field(one_of("exact", "int8"), "'exact' or 'int8'", "exact"),
    "params": Field(TABLE, 'for example slope = { dims = ["head"], dtype = "f32" }', None),
    "rope": Field(TABLE, "an [attention.rope] table, or leave it out", None),
}
"""Keys of [attention] beside those of registered masks, scores and sinks (``kvgen.variants``)."""
PARAM = {
    "dims": Field(kind_of(list, "a list", "array"), f"a list of names out of {', '.join(PARAM_DIMS)}"),
    "dtype": Field(one_of(*PARAM_TYPES), " or ".join(map(repr, PARAM_TYPES)), "f32"),
}
ROPE = {
    "kind": Field(text(100), "'default', 'linear', 'llama3' or 'yarn'", "default"),
    "pairing": Field(one_of(*PAIRINGS), " or ".join(map(repr, PAIRINGS)), "half"),
    "dim": Field(integer(2, 576, 2), "rotated elements, an even number; leave it out for head_dim", None),
    "theta": Field(number(1.0, 2.0**100), "for example 10000.0", 10000.0),
    "stored": Field(one_of(*STORED), " or ".join(map(repr, STORED)), "post"),
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


def quant_fields() -> dict[str, Field]:
    """Keys of [cache.k] and [cache.v], registered codecs included."""
    return {
        "format": Field(one_of(*CODECS), " or ".join(map(repr, CODECS))),
        "group": Field(TABLE, "for example { tok = 1, head = 1 }", None),
        "scale_dtype": Field(one_of(*SCALE_DTYPES), " or ".join(map(repr, SCALE_DTYPES)), "f32"),
        "affine": Field(SWITCH, "true (scale * code + min) or false", False),
        "outer": Field(TABLE, "{} (one more f32 scale for all) or { head = 1 }", None),
        "scales": Field(one_of(*SCALE_PLACES), " or ".join(map(repr, SCALE_PLACES)), "page"),
        "transform": Field(one_of("hadamard"), "'hadamard', or leave it out", None),
        "mean": Field(SWITCH, "true (subtract a given mean) or false", False),
        "levels": Field(kind_of(list, "a list", "array"), "3 to 16 ascending numbers", None),
        "measure": Field(one_of("amax", "rms"), "'amax' or 'rms'", None),
        "layout": Field(_LAYOUT, "the axes right of kv, for example 'head d/8 tok d%8'", None),
    }


def note(problems: Problems, path: str, value: object, reason: str, hint: str = "") -> None:
    """Record a mistake once, with a value that can be shown."""
    path = path if len(path) <= 300 else f"{path[:100]}..."
    mistake = Diagnostic(path, _showable(value), reason, hint)
    if mistake not in problems:
        problems.append(mistake)


def _showable(value: object) -> object:
    """``value``, or a description where printing it fails or is long: huge integers, deep nesting."""
    try:
        shown = repr(value) if _plain(value) else brief(value)
    except (ValueError, RecursionError):
        shown = ""
    if not 0 < len(shown) <= 500:
        return f"({type(value).__name__} too large to show)"
    return value if _plain(value) else shown


def _plain(value: object) -> bool:
    """Whether a value is such as TOML has, all through: its repr runs no code of anybody else's."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(_plain(key) and _plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_plain, value))  # type: ignore[call-overload]
    return value is None or type(value) in _PLAIN


_PLAIN = (str, bytes, bool, int, float, complex, datetime.date, datetime.time, datetime.datetime)


def read_table(fields: Mapping[str, Field], table: Any, path: str, problems: Problems) -> dict[str, Any]:
    """Every field of ``fields`` from ``table``; mistakes go to ``problems`` and read as MISSING."""
    if not isinstance(table, Mapping):
        if table is not MISSING:
            note(problems, path or "spec", table, "not a table", "a table (a mapping with string keys)")
        return {name: MISSING if f.default is REQUIRED else f.default for name, f in fields.items()}
    prefix = f"{path}." if path else ""
    unknown = [key for key in table if not isinstance(key, str) or key not in fields]
    if len(unknown) > MOST_UNKNOWN:
        note(
            problems,
            path or "spec",
            f"({len(table)} keys)",
            "this is no spec",
            f"known keys: {', '.join(fields)}",
        )
    for key in unknown[:MOST_UNKNOWN]:
        note(problems, f"{prefix}{_showable(key)}", table[key], "unknown key", nearest(key, fields))
    return {name: _read(name, f, table, prefix, problems) for name, f in fields.items()}


def nearest(key: Any, known: Collection[str]) -> str:
    """A hint for an unknown key: the known one that it resembles, or all of them."""
    # Of a long key only the start is compared: the time grows with the square of the length.
    near = difflib.get_close_matches(key[:40], known, 1, 0.5) if isinstance(key, str) else []
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"


def _read(name: str, field: Field, table: Mapping[str, Any], prefix: str, problems: Problems) -> Any:
    if name not in table or (table[name] is None and field.default is None):
        if field.default is REQUIRED:
            note(problems, f"{prefix}{name}", None, "missing", field.hint)
            return MISSING
        return field.default
    reason = field.check(table[name])
    if reason is None:
        return table[name]
    note(problems, f"{prefix}{name}", table[name], reason, field.hint)
    return MISSING
