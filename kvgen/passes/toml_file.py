"""toml_file: a spec's file -> its mapping, or one line that says what is wrong with the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvgen import bounded
from kvgen.errors import ABSENT, Diagnostic, SpecError


def read_toml(source: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, with or without a byte order mark.

    Raises ``SpecError`` with the path, the reason and what to give instead.
    """
    try:
        data = bounded.read(source, bounded.TOML_BYTES)
    except FileNotFoundError:
        raise _unreadable(source, "no such file", "give the path of a TOML spec") from None
    except IsADirectoryError:
        raise _unreadable(source, "is a folder", "give a TOML file in it") from None
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise _unreadable(source, reason, "give the path of a TOML spec") from None
    except bounded.RefusedError as error:
        raise _unreadable(source, str(error), "give the path of a TOML spec") from None
    except ValueError as error:  # a path with a NUL
        raise _unreadable(source, f"is no path: {error}", "give the path of a TOML spec") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: byte {error.start} is {data[error.start]:#x}"
        raise _unreadable(source, reason, "save it as UTF-8, as TOML demands") from None
    try:
        return bounded.parse_toml(text)
    except bounded.RefusedError as error:
        raise _unreadable(source, f"is no spec: {error}", "see examples/") from None
    except (ValueError, RecursionError) as error:  # no TOML, an endless number, endless nesting
        raise _unreadable(source, *_explained(text, error)) from None


def _explained(text: str, error: Exception) -> tuple[str, str]:
    """Why a text is not TOML, and what would help: the line, and a key that stands there twice."""
    start = re.sub(r"(?m)^\s*#.*$", "", text).lstrip()
    if start.startswith("{"):
        return "is JSON, not TOML", "write it as in examples/, or give kvgen.build the dict"
    if re.match(r"(---|%YAML|[\w\"']+\s*:(\s|$))", start):
        return "is YAML, not TOML", "write it as in examples/: [table] and key = value"
    at = re.search(r"\(at line (\d+)", str(error))
    line = text.splitlines()[int(at[1]) - 1].strip() if at and int(at[1]) <= len(text.splitlines()) else ""
    key = re.match(r"([\w\s.\"'-]+?)\s*=|(\[.*\])", line)
    if key and re.search(r"overwrite|twice|duplicate", str(error), re.IGNORECASE):
        name = (key[1] or key[2])[:100]
        return f"{name} stands there twice, the second time in line {at[1] if at else 0}", "leave one out"
    shown = f": {line[:80]}" if line else ""
    return f"is not TOML: {str(error)[:200]}{shown}", "see examples/"


def _unreadable(source: str | Path, reason: str, hint: str) -> SpecError:
    shown = str(source) if len(str(source)) <= 300 else f"{str(source)[:100]}..."
    return SpecError([Diagnostic(shown, ABSENT, reason, hint)], unread=True)
