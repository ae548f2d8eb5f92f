"""reading: a table of a spec and the rules of its fields -> values, and a note of every mistake.

A hint is worked out by trying: what it names in the place of a wrong value was given to the same rule.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final

from kvgen.errors import ABSENT, Diagnostic, brief
from kvgen.names import KEY, suggest
from kvgen.passes.fields import CACHE, CHOICES, REQUIRED, ROPE, Field, quant_fields

Problems = list[Diagnostic]


class _Missing:
    """Stands for a field whose value was absent or wrong (the mistake is already recorded)."""

    def __repr__(self) -> str:
        return "(missing)"


MISSING: Final = _Missing()
MOST_UNKNOWN: Final = 50
"""Unknown keys of a table that are named one by one."""


def note(
    problems: Problems,
    path: str,
    value: object,
    reason: str,
    hint: str = "",
    *,
    works: tuple[Any, ...] = (),
    rename: str = "",
) -> None:
    """Record a mistake once, with a value that can be shown. ``works``, ``rename``: as in ``Diagnostic``."""
    path = path if len(path) <= 300 else f"{path[:100]}..."
    mistake = Diagnostic(path, _showable(value), reason, hint, works, rename)
    if mistake not in problems:
        problems.append(mistake)


def _showable(value: object) -> object:
    """``value``, or a description where printing it fails or is long: huge integers, deep nesting."""
    if value is ABSENT:
        return value
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
    meant = set()
    for key in unknown[:MOST_UNKNOWN]:
        meant.add(note_unknown(problems, f"{prefix}{_showable(key)}", key, table, fields))
    return {name: _read(name, f, table, prefix, problems, name in meant) for name, f in fields.items()}


def note_unknown(
    problems: Problems, path: str, key: Any, table: Mapping[Any, Any], fields: Mapping[str, Field]
) -> str:
    """Record an unknown key with the known one that is meant, which is returned, or with its table, or with
    all known ones."""
    value, meant = table[key], suggest(key, fields, KEY, guess=False)
    home = "" if meant else _home(key)
    meant = meant or (None if home else suggest(key, fields))
    if meant is None:
        note(problems, path, value, "unknown key", home or f"known keys: {', '.join(fields)}")
        return ""
    instead = () if fields[meant].check(value) is None else _near(fields[meant], value)
    hint = f"did you mean {meant} = {instead[0]!r}?" if instead else f"did you mean {meant!r}?"
    note(problems, path, value, "unknown key", hint, works=instead[:1], rename=meant)
    return meant


def _home(key: Any) -> str:
    """Where a key belongs that is none of its table; empty where it is none at all."""
    from kvgen.variants import attention_fields

    for where, fields in (
        ("[attention]", attention_fields()),
        ("[cache]", CACHE),
        ("[cache.k] and [cache.v]", quant_fields()),
        ("[attention.rope]", ROPE),
    ):
        if isinstance(key, str) and key in fields:
            return f"it belongs into {where}"
    return ""


def _near(field: Field, value: Any) -> tuple[Any, ...]:
    """Values that a field takes and that might be meant by one that it does not take."""
    try:
        found = dict.fromkeys(field.check.near(value))
    except (TypeError, ValueError, ArithmeticError):
        return ()
    return tuple(each for each in found if field.check(each) is None)


def _read(
    name: str, field: Field, table: Mapping[str, Any], prefix: str, problems: Problems, renamed: bool
) -> Any:
    """The value of a field. ``renamed``: it stands in the table under another name, which was noted."""
    if name not in table or (table[name] is None and field.default is None):
        if field.default is REQUIRED and not renamed:
            note(problems, f"{prefix}{name}", ABSENT, "missing", field.hint)
        return MISSING if field.default is REQUIRED else field.default
    value = table[name]
    reason = field.check(value)
    if reason is None:
        return value
    works = _near(field, value)
    note(problems, f"{prefix}{name}", value, reason, _hint(field, value, works, problems), works=works)
    return MISSING


def _hint(field: Field, value: Any, works: tuple[Any, ...], problems: Problems) -> str:
    """What is meant, then what there is to choose from: told once, however many fields have the choice."""
    if works and not isinstance(works[0], str):
        return working(*works) + (field.advice(value, works[-1]) if field.advice else "")
    said = [f"did you mean {works[0]!r}?"] if works else []
    listed = field.hint.startswith(CHOICES)
    told = next((found.path for found in problems if listed and field.hint[1:] in found.hint), "")
    if not works:
        said.append(f"see the choices of {told}" if told else field.hint)
    elif listed and not told:
        said.append(field.hint[0].upper() + field.hint[1:])
    return " ".join(said)


def working(*values: Any) -> str:
    """``16, 32 and 64 work``."""
    *front, last = map(str, values)
    return f"{', '.join(front)} and {last} work" if front else f"{last} works"
