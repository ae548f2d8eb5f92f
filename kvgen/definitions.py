"""definitions: codecs and variants of your own, from a file or from an installed package.

``load("mine.py")`` runs a file that registers some (``kvgen ... --import mine.py`` does the same). A package
names a module that registers them under the entry-point group ``kvgen.definitions``; such modules are
imported before a spec is read or a list is printed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path

from kvgen.errors import ArgumentError

GROUP = "kvgen.definitions"
"""The entry-point group of packages that bring codecs and variants."""

_loaded: dict[Path, str] = {}
_asked = False


class DefinitionsWarning(UserWarning):
    """An installed package was to bring definitions, and could not."""


def load(path: str | Path) -> None:
    """Run a Python file that registers codecs and variants; once, however often it is asked for.

    ``ArgumentError`` says what the file raised. Its code runs: load none that you do not trust.
    """
    file = Path(path).resolve()
    if file in _loaded:
        return
    if not file.is_file() or file.suffix != ".py":
        reason = "a folder" if file.is_dir() else "no Python file" if file.exists() else "no such file"
        raise ArgumentError(f"import {path}: {reason}; give a .py file that registers codecs or variants")
    # A name of its own: two files may be called alike, and neither may hide a module of that name.
    name = f"kvgen_import_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = _line(error, file)
        raise ArgumentError(f"import {path}{where}: {type(error).__name__}: {error}") from error
    _loaded[file] = name


def load_installed() -> None:
    """Import the modules that installed packages name in the group ``kvgen.definitions``, once.

    One that cannot be imported is left out with a warning: a spec that needs it will say what it lacks.
    """
    global _asked
    if _asked:
        return
    _asked = True
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # noqa: BLE001 - somebody else's code may raise anything
            brought = f" of {entry.dist.name}" if entry.dist is not None else ""
            warnings.warn(
                f"{GROUP}: {entry.value}{brought} was left out: {type(error).__name__}: {error}",
                DefinitionsWarning,
                stacklevel=2,
            )


def _line(error: Exception, file: Path) -> str:
    """``, line 12``: the last line of the file that had a part in the error."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            found = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return found
