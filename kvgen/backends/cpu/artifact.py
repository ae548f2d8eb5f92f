"""A built library on disk: one folder holding source, binary, compiler log and a sidecar that vouches for
them.

::

    build/<name>-<key16>/
        <name>.cpp      the source, kept for reading, perf and gdb (<name>_1.cpp ... when there are several)
        <name>.so       the shared object
        <name>.json     the sidecar: full key, size and sha256 of the .so, what the CPU must have, how it was
        built <name>.log      what the compiler said (only when it said something)

The folder is renamed into place as a whole, so a binary can never sit beside another build's sidecar.
``dlopen`` of a truncated file maps pages past its end and dies by SIGBUS, and what somebody else wrote runs
as code, so nothing is opened before ``verify`` has read it and seen who may write to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvgen import bounded, paths, trust
from kvgen.errors import ToolchainError, brief

SCHEMA = 2
"""Version of the sidecar's fields and of the base flags; a change makes every older entry a miss."""
MOST_SIDECAR = 1 << 20
MOST_LIBRARY = 1 << 30
"""Most bytes of the two files."""


@dataclass(frozen=True)
class Sidecar:
    """What the JSON beside a library says; field by field the same as the file."""

    schema: int
    key: str
    """sha256 (hex) of everything the build depends on."""
    size: int
    """Bytes of the .so."""
    sha256: str
    """Of the .so, hex."""
    arch: str
    """Architecture it was built for, as ``isa.machine`` spells it."""
    requires: list[str]
    """Features (names of ``isa.FEATURES``) without which it must not run."""
    sanitize: bool
    """Whether it needs the sanitizer runtimes in the process."""
    compiler: str
    """Version and triple of the compiler."""
    flags: list[str]
    """The flags of its compile step."""
    link_flags: list[str]
    """The flags of its link step."""
    seconds: float
    """Time the compiler took."""

    def dump(self) -> str:
        """The sidecar's text: one field a line, keys in the order declared above."""
        return json.dumps(asdict(self), indent=1) + "\n"


_KINDS: dict[str, Any] = {
    "schema": int,
    "key": str,
    "size": int,
    "sha256": str,
    "arch": str,
    "requires": list,
    "sanitize": bool,
    "compiler": str,
    "flags": list,
    "link_flags": list,
    "seconds": int | float,
}
"""What each value of a sidecar is."""


def digest(data: bytes) -> str:
    """sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def read_sidecar(library: Path) -> Sidecar:
    """The sidecar of a library.

    Raises:
        ToolchainError: missing, unreadable, or not a sidecar of this schema.
    """
    path = library.with_suffix(".json")
    try:
        found = bounded.read_json(path, MOST_SIDECAR)
    except (OSError, ValueError) as error:
        raise ToolchainError(f"{library}: no readable sidecar {path.name} ({error})") from error
    try:
        read = to_sidecar(found)
    except ValueError as error:
        raise ToolchainError(f"{library}: {path.name} {error}") from None
    if read.schema != SCHEMA:
        raise ToolchainError(f"{library}: {path.name} is not a sidecar of schema {SCHEMA}")
    return read


def to_sidecar(found: Any) -> Sidecar:
    """The sidecar that these values are, as JSON has them; ``ValueError`` says why they are none."""
    if not isinstance(found, Mapping) or set(found) != set(_KINDS):
        raise ValueError(f"is not a sidecar: {brief(found)}")
    for name, kind in _KINDS.items():
        value = found[name]
        texts = kind is list and isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not texts and (kind is list or not isinstance(value, kind) or type(value) is bool is not kind):
            raise ValueError(f"is not a sidecar: {name} = {brief(value)}")
    return Sidecar(**found)


def verify(library: Path, key: str | None = None) -> Sidecar:
    """Check a library against its sidecar without opening it as code.

    Args:
        library: path of the ``.so``.
        key: the build key expected; None = any.

    Raises:
        ToolchainError: missing, truncated, altered, built from something else, or open to others (see
            ``kvgen.trust``); the message says which.
    """
    for path in (library.with_suffix(".json"), library):
        trust.require(path)
    found = read_sidecar(library)
    if key is not None and found.key != key:
        raise ToolchainError(
            f"{library}: built from something else (key {found.key[:16]}, expected {key[:16]})"
        )
    try:
        data = bounded.read(library, MOST_LIBRARY, exactly=found.size)
    except OSError as error:
        raise ToolchainError(f"{library}: {error.strerror}") from error
    except ValueError as error:
        raise ToolchainError(f"{library}: {error}, as its sidecar says: truncated or foreign") from error
    if digest(data) != found.sha256:
        raise ToolchainError(f"{library}: its content differs from its sidecar's sha256: damaged or foreign")
    return found


def lookup(folder: Path, name: str, key: str) -> Path | None:
    """The verified library of a build folder, or None. A damaged folder is set aside, with a warning."""
    library = folder / f"{name}.so"
    if not os.path.exists(folder):  # unlike Path.exists, False also where a parent may not be searched
        return None
    try:
        verify(library, key)
    except ToolchainError as error:
        moved = paths.set_aside(folder, str(error))
        if moved is not None:
            _put_back_if_sound(moved, folder, name, key)
        # Another process may have rebuilt it between our look and our rename; then its build is the answer.
        return library if _is_sound(library, key) else None
    return library


def _is_sound(library: Path, key: str) -> bool:
    """Whether ``verify`` accepts the library."""
    try:
        verify(library, key)
    except ToolchainError:
        return False
    return True


def _put_back_if_sound(moved: Path, folder: Path, name: str, key: str) -> None:
    """Undo a rename that hit another process's fresh build instead of the damaged one that was looked at."""
    if _is_sound(moved / f"{name}.so", key) and not folder.exists():
        moved.rename(folder)
