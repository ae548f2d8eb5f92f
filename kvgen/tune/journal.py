"""journal: what is known of the candidates of one op, a JSON line each, appended the moment it is known.

``<folder>/<target>/<op>__<spec8>.trials.jsonl``. A run that is killed leaves all it has found out, and the
next one does not do it again: a line is known by its kind and by *all* that its facts depend on (the build's
key; or binary, variant or bucket, budget, protocol, device), never by its place in a list.

The file is only ever appended to. Its first line says what it is about; a file that is about something else,
or that holds what no tuner wrote, is set aside. A line that breaks off was being written when the process
was killed: it is skipped, the rest is used, and a line "torn" after it says that this was seen.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvgen import bounded, paths, trust
from kvgen.errors import ToolchainError

FORMAT = 1
"""Raised whenever a line changes its meaning."""

MOST_BYTES = 64 << 20
"""Of a file that is read."""

MESSAGE = 2000
"""Most characters of a message that are kept."""

Line = dict[str, Any]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _text(value: Any) -> bool:
    return isinstance(value, str)


FACTS: dict[str, dict[str, Any]] = {
    "build": {"outcome": _text, "message": _text, "seconds": _number, "binary": _text, "limit_s": _number},
    "check": {"outcome": _text, "message": _text, "seconds": _number, "limit_s": _number},
    "time": {
        "outcome": _text, "message": _text, "seconds": _number, "ratio": _number, "base_s": _number,
        "limit_s": _number,
    },
    "pair": {
        "outcome": _text, "message": _text, "ratio": _number, "wins": _number, "first_s": _number,
        "second_s": _number, "calm": lambda value: isinstance(value, bool), "limit_s": _number,
    },
    "trial": {"outcome": _text, "message": _text},
}  # fmt: skip
"""By kind of line: facts it must have, and what they must be."""


class Journal:
    """The lines of one file, and the pen to add some. Safe to use from several threads."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        """Read what is there. ``head``: what the file is about; one about something else is set aside."""
        self.notes: list[str] = []
        """What a reader of the report should know of the file."""
        self._path: Path | None = path
        self._head: Line = {"kind": "head", "format": FORMAT, **head}
        self._known: dict[str, Line] = {}
        self._new: set[str] = set()
        self._used: dict[str, str] = {}
        self._lock = threading.Lock()
        self._prefix = b""
        self._read(path)

    def known(
        self, kind: str, key: Mapping[str, Any], believed: Callable[[Line], bool] = lambda line: True
    ) -> Line | None:
        """The facts of the line with this key; an earlier run's must be believed, and count as used."""
        name = _name(kind, key)
        found = self._known.get(name)
        if found is not None and name not in self._new:
            if not believed(found):
                return None
            self._used[name] = kind
        return found

    @property
    def used(self) -> dict[str, int]:
        """How many lines of earlier runs spared work, by kind."""
        return dict(Counter(self._used.values()))

    def add(self, kind: str, key: Mapping[str, Any], **facts: Any) -> None:
        """Append a line at once, so that it outlives this process."""
        if "message" in facts:
            facts["message"] = str(facts["message"])[:MESSAGE]
        name = _name(kind, key)
        line: Line = {"kind": kind, "key": dict(key), **facts}
        with self._lock:
            self._known[name] = line
            self._new.add(name)
            self._append(json.dumps(line, sort_keys=True).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        if self._path is None:
            return
        try:
            # One write of one buffer: lines of two processes do not mix, and a kill breaks off one at most.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            handle = os.open(self._path, flags, paths.FILE_MODE)
            try:
                data = self._prefix + line
                while data:  # a disk that fills takes a part, then says so
                    data = data[os.write(handle, data) :]
            finally:
                os.close(handle)
            self._prefix = b""
        except OSError as error:
            if error.errno not in paths.UNWRITABLE:
                raise
            reason = f"trials are not logged ({error.strerror}): a killed run would start again"
            warnings.warn(f"{self._path}: {reason}", paths.CacheWarning, stacklevel=3)
            self._path = None

    def _read(self, path: Path) -> None:
        self._prefix = _dump(self._head)
        try:
            trust.require(path)
            data = bounded.read(path, MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError, ToolchainError) as error:
            paths.set_aside(path, f"cannot be read ({getattr(error, 'strerror', error)})")
            return
        *whole, rest = data.split(b"\n")
        try:
            if not (rest.startswith(b"{") if whole else _dump(self._head).startswith(rest)) and rest:
                raise _BadError("is no log of trials (what it ends with is no line)")
            lines = _parse(whole)
            self._check(lines)
        except _BadError as error:
            paths.set_aside(path, str(error))
            return
        self._known = {_name(line["kind"], line["key"]): line for line in lines if "key" in line}
        if lines:
            self._prefix = b""
        if rest:
            self.notes.append(f"{path.name}: the last line breaks off (a killed run); the others are used")
            self._prefix = b"\n" + _dump({"kind": "torn"}) + self._prefix

    def _check(self, lines: list[Line]) -> None:
        for number, line in enumerate(lines):
            if number == 0 or line["kind"] == "head":
                for name, value in self._head.items():
                    if line.get(name) != value:
                        raise _BadError(
                            f"is not what its name says: {name} is {line.get(name)!r}, not {value!r}"
                        )
                continue
            if line["kind"] == "torn":
                continue
            facts = FACTS.get(line["kind"])
            if facts is None or not isinstance(line.get("key"), dict):
                raise _BadError(f"is no log of trials: a line of kind {line['kind']!r} without a key")
            for name, fits in facts.items():
                if not fits(line.get(name)):
                    raise _BadError(
                        f"is no log of trials: {name} is {line.get(name)!r} in a {line['kind']} line"
                    )


class _BadError(ValueError):
    """A file that this journal cannot have written."""


def _parse(whole: list[bytes]) -> list[Line]:
    """The lines that are whole. What breaks off must be the last one or be followed by "torn"."""
    found: list[Line] = []
    broken = 0
    for number, text in enumerate(whole, 1):
        try:
            line = bounded.parse_json(text)
        except ValueError:
            line = None
        good = isinstance(line, dict) and isinstance(line.get("kind"), str)
        if broken and not (good and line["kind"] == "torn"):
            raise _BadError(f"is no log of trials (line {broken})")
        broken = 0 if good else number
        if good:
            found.append(line)
    if broken:
        raise _BadError(f"is no log of trials (line {broken})")
    return found if found[:1] != [{"kind": "torn"}] else found[1:]


def _dump(line: Line) -> bytes:
    return json.dumps(line, sort_keys=True).encode() + b"\n"


def _name(kind: str, key: Mapping[str, Any]) -> str:
    return kind + json.dumps(dict(key), sort_keys=True)
