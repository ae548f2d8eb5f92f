"""bounded: files and texts of others, whose size and depth are known before anything reads or parses them.

A parser takes time and memory that its author never meant: by nesting, by the parts of a dotted key, by a
device that never ends. What is refused here costs no more than one pass over a text of bounded length.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

JSON_BYTES = 64 << 20
"""Most bytes of a JSON file, unless the caller says less."""
TOML_BYTES = 64 << 10
"""Most bytes of a spec."""
DEEPEST = 64
"""Most brackets around a value."""
MOST_PARTS = 8
"""Most parts of a dotted key or of a table's name."""

_JSON_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_TOML_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:[^"\\\n]|\\.)*+"?+'
    r"|'[^'\n]*+'?+"
    r"|#[^\n]*+",
    re.DOTALL,
)
"""Strings and comments. One that is not closed runs to the end: the parser refuses it at this place."""
_PART = re.compile(r"[ \t]*[\w-]*[ \t]*")
_BRACKETS = bytes.maketrans(b"[]{}", b"()()")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


class RefusedError(ValueError):
    """A file or text that is not read, or not parsed; the message is a short reason."""


def opened(path: Path | str) -> BinaryIO:
    """``path`` opened for reading if it is a regular file, without waiting for anything.

    Raises ``RefusedError`` for a device, a pipe or a socket, ``OSError`` for what is missing or a folder.
    """
    _regular(os.stat(path), path)  # first, because to open a device can mean something to it
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read(path: Path | str, most: int, *, exactly: int | None = None) -> bytes:
    """The content of a regular file of at most ``most`` bytes; its size is compared before it is read.

    ``exactly``: the size that it must have. Raises ``RefusedError`` and, as ``open`` does, ``OSError``.
    """
    with opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if exactly is not None and size != exactly:
            raise RefusedError(f"{size} bytes instead of {exactly}")
        if size > most:
            raise RefusedError(f"{size:,} bytes, and at most {most:,} are read")
        data = stream.read(size + 1)
    if len(data) > size:
        raise RefusedError("it grew while it was read")
    return data


def read_json(path: Path | str, most: int = JSON_BYTES) -> Any:
    """The value of a JSON file. Raises ``RefusedError``, ``ValueError`` (no JSON) or ``OSError``."""
    return parse_json(read(path, most))


def parse_json(text: bytes | str, deepest: int = DEEPEST, **hooks: Any) -> Any:
    """The value of a JSON text of at most ``deepest`` levels. Raises ``RefusedError`` or ``ValueError``.

    ``hooks``: as ``json.loads`` takes them.
    """
    data = text.encode() if isinstance(text, str) else text
    if too_deep(_JSON_TEXT.sub(b"", data), deepest):
        raise RefusedError(f"more than {deepest} brackets around a value")
    return json.loads(data, **hooks)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ``RefusedError`` or ``tomllib.TOMLDecodeError``."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > TOML_BYTES:
        raise RefusedError(f"{size:,} bytes, and at most {TOML_BYTES:,} are read")
    bare = _TOML_TEXT.sub(_blank, text)
    if too_deep(bare.encode("utf-8", "surrogatepass"), DEEPEST):
        raise RefusedError(f"more than {DEEPEST} brackets around a value")
    first, *pieces = bare.split(".")
    run, line = 1, first.count("\n") + 1
    for piece in pieces:
        run += 1
        if run > MOST_PARTS:
            raise RefusedError(f"line {line}: a name of more than {MOST_PARTS} parts between dots")
        line += piece.count("\n")
        run = run if _PART.fullmatch(piece) else 1
    return tomllib.loads(text)


def too_deep(data: bytes, deepest: int) -> bool:
    """Whether brackets nest deeper, in a text without strings. Unbalanced ones count as if they all did."""
    left = data.translate(_BRACKETS, _OTHERS)
    for _ in range(deepest):
        fewer = left.replace(b"()", b"")
        if fewer == left:
            return left.count(b"(") > deepest
        left = fewer
    return b"(" in left


def _blank(found: re.Match[str]) -> str:
    """A letter for a string, nothing for a comment, over as many lines."""
    return ("" if found[0].startswith("#") else "x") + "\n" * found[0].count("\n")


def _regular(status: os.stat_result, path: Path | str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError(f"no regular file but {_kind(status.st_mode)}; it is not read")


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"
