"""Where kvgen keeps what it makes on this machine, and how files get there whole.

The user cache folder is ``$KVGEN_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvgen``, else ``~/.cache/kvgen``. When
that cannot be written (read-only home, no ``HOME``, full disk) work goes on in a temporary folder of this
process, with one warning: a missing cache costs time, never a result. So it does where somebody else could
have written to it (see ``kvgen.trust``), since what is read back is run.

Nothing here takes a lock. A file or folder is made under a temporary name *in the same folder* and renamed
into place, so a killed process leaves neither a stale lock nor a half-written file under the final name.

A new cache folder is open to its owner only (0700). What is made in it nobody else may write to, whatever
the umask, but others could read it: to share a cache is one ``chmod`` of the root away.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

from kvgen import trust

SUBFOLDERS = ("build", "tune", "triton")
"""The folders inside the cache root: compiled CPU libraries, tuning records, Triton's own cache."""

UNWRITABLE = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ENOENT,
    }
)
"""Values of ``OSError.errno`` that mean "this folder cannot take files" rather than "kvgen has a bug"."""

REMEDY = "Set KVGEN_CACHE_DIR to a writable folder to keep what is built"
FOLDER_MODE = 0o755
"""Most rights of a folder inside a cache, less the umask."""
FILE_MODE = 0o644
"""Most rights of a file inside a cache, less the umask."""


class CacheWarning(UserWarning):
    """The cache is not as it should be (unwritable, a stranger's, damaged); results are unaffected."""


_lock = threading.Lock()
_temporary: Path | None = None
_warned: set[str] = set()


def configured_root() -> Path | None:
    """The cache folder the environment names (it may not exist); None when it names none."""
    explicit = os.environ.get("KVGEN_CACHE_DIR")
    if explicit:
        with contextlib.suppress(RuntimeError):  # the home of a user that does not exist: a folder named "~x"
            return Path(explicit).expanduser().absolute()
        return Path(explicit).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative paths are invalid and must be ignored.
    if xdg and Path(xdg).is_absolute():
        return Path(xdg) / "kvgen"
    home = os.environ.get("HOME", "")
    return Path(home) / ".cache" / "kvgen" if home and Path(home).is_absolute() else None


def cache_root() -> Path:
    """The cache folder, writable; where the configured one is not, a temporary one (warned once)."""
    root = configured_root()
    if root is None:
        return fallback(
            "user cache", "neither KVGEN_CACHE_DIR, XDG_CACHE_HOME nor HOME names an absolute folder"
        )
    return writable(root)


def subfolder(name: str) -> Path:
    """One of ``SUBFOLDERS`` inside the cache root, existing and writable.

    Raises:
        ValueError: ``name`` is not one of ``SUBFOLDERS``.
    """
    if name not in SUBFOLDERS:
        raise ValueError(f"cache subfolder {name!r}: expected one of {', '.join(SUBFOLDERS)}")
    return writable(cache_root() / name)


def readable(name: str) -> Path | None:
    """One of ``SUBFOLDERS`` as it is, if what lies there may be loaded; it need not exist or be writable.

    None where no cache folder is configured; as ``subfolder``, with a warning, where it is not to be trusted.
    """
    root = configured_root()
    if root is None or not trust.fault(root / name):
        return root and root / name
    return subfolder(name)


def writable(folder: Path) -> Path:
    """``folder``, made if need be, if files can really be written there and what others wrote cannot get in;
    else a temporary one (warned)."""
    if not is_temporary(folder) and (reason := trust.fault(folder)):
        return fallback(str(folder), reason, trust.remedy(folder))
    try:
        make(folder)
        probe(folder)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return fallback(str(folder), f"it cannot be written ({error.strerror})")
    return folder


def make(folder: Path, mode: int = 0o700) -> None:
    """Make a folder and what is missing above it with this mode; inside the cache others may read."""
    root = configured_root()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER_MODE if root in path.parents else mode, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises where it is a file


def probe(folder: Path) -> None:
    """Write a file into ``folder`` and remove it again; raises the ``OSError`` of what fails.

    Permission bits prove nothing: root ignores them, a read-only mount or a full disk does not show in them.
    """
    handle, file = tempfile.mkstemp(prefix=".probe-", dir=folder)
    try:
        os.write(handle, bytes(4096))
    finally:
        os.close(handle)
        os.unlink(file)


def is_temporary(folder: Path) -> bool:
    """Whether a folder that ``writable`` gave goes away with this process."""
    return _temporary is not None and folder.is_relative_to(_temporary)


def fallback(what: str, reason: str, remedy: str = REMEDY) -> Path:
    """A folder for ``what`` in this process's temporary folder, removed at exit; warns once per ``what``."""
    global _temporary
    with _lock:
        if _temporary is None or not _temporary.is_dir():
            _temporary = Path(tempfile.mkdtemp(prefix="kvgen-cache-"))
            atexit.register(shutil.rmtree, _temporary, ignore_errors=True)
            trust.vouch(_temporary)
        first = what not in _warned
        _warned.add(what)
        folder = _temporary / (what.strip(os.sep).replace(os.sep, "_").replace(" ", "_")[-100:] or "root")
        folder.mkdir(mode=0o700, exist_ok=True)
    if first:
        warnings.warn(
            f"cache folder {what}: {reason}; using {folder} until this process ends. "
            f"{remedy[0].upper()}{remedy[1:]}.",
            CacheWarning,
            stacklevel=3,
        )
    return folder


def write_atomic(path: Path, data: bytes | str) -> None:
    """Put ``data`` (text as UTF-8) at ``path`` in one step: readers see the old file or the whole new one.

    Raises:
        OSError: the folder is missing, read-only or full; nothing is left behind then.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    # Not mkstemp: its mode 0600 would stay, and a cache shared between users could not be read.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def set_aside(path: Path, reason: str) -> Path | None:
    """Rename a damaged or foreign file or folder to ``<name>.bad-<n>`` and warn, so that it can be studied.

    Returns the new path; None when the entry was already gone (another process set it aside) or cannot be
    renamed (read-only folder), which the warning says. Never deletes anything.
    """
    for number in range(1000):
        target = path.with_name(f"{path.name}.bad-{number}")
        if target.exists():
            continue
        try:
            os.rename(path, target)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process took this number
                continue
            warnings.warn(f"{path}: {reason}; left in place ({error.strerror})", CacheWarning, stacklevel=2)
            return None
        warnings.warn(f"{path}: {reason}; set aside as {target.name}", CacheWarning, stacklevel=2)
        return target
    warnings.warn(
        f"{path}: {reason}; left in place (1000 damaged copies are there already)", CacheWarning, stacklevel=2
    )
    return None
