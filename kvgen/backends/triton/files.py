"""Files that other processes may read at any time: written whole, named by their content."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib.util import cache_from_source
from pathlib import Path

from kvgen import paths, trust


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` under a temporary name and move it into place: a reader never sees a part.

    No lock file, so nothing is left stale by a process that is killed. Raises OSError.
    """
    paths.make(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_module(text: str, folder: Path) -> Path:
    """Write ``text`` as a content-addressed Python module in ``folder`` and return its path.

    ``triton.jit`` reads a kernel's source back from its file, so the file must outlive the import.
    """
    data = text.encode()
    path = folder / f"k{hashlib.sha256(data).hexdigest()[:32]}.py"
    if trust.fault(path) or not path.is_file() or path.read_bytes() != data:
        write_atomically(path, data)
    compiled = Path(cache_from_source(str(path)))  # what an import would run instead of the text
    if trust.fault(compiled):
        compiled.unlink(missing_ok=True)
    return path


def set_aside(path: Path) -> None:
    """Rename a file that cannot be trusted to ``<name>.bad``, so that it is neither used nor lost."""
    if path.exists():
        os.replace(path, path.with_name(path.name + ".bad"))
