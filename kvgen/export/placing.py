"""placing: a folder of files comes to its place in one step, whole, whatever is killed when.

Everything is made in a folder beside the place, then the two are exchanged by one call of the system, and the
former one is removed. Where the system or its file system cannot exchange, the former folder is moved away
first: a run that is killed between the two moves leaves the place empty, and ``recover`` puts it back.

What a killed run leaves beside the place is removed by the next one; a lock, which ends with its process,
tells it from what a run beside us is still writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvgen import paths
from kvgen.errors import ArgumentError

_FORMER = "-former"
_CANNOT = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV})
"""What a system or file system answers that exchanges no folders."""


def put(folder: Path, files: Mapping[str, bytes], check: Callable[[Path], object]) -> None:
    """Make ``folder`` hold these files, by relative path, and nothing else.

    ``check`` raises where a folder holds what must not be lost; it is asked before what was there is removed.
    Raises ``ArgumentError`` for a place that cannot be moved, ``OSError`` for what the disk refuses; what was
    there is there then.
    """
    target = folder.absolute()
    above = [path for path in target.parents if not path.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as made:
            for name, data in files.items():
                paths.make((made / name).parent, paths.FOLDER_MODE)
                _create(made / name, data)
            if target.exists():
                made.chmod(target.stat().st_mode & 0o7777)
            _swap(made, target, check)
    except BaseException:
        for path in above:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    sweep(target)


def recover(folder: Path, whole: Callable[[Path], bool]) -> None:
    """Put back what a run that was killed between two moves has left beside an empty place."""
    target = folder.absolute()
    if os.path.lexists(target):
        return
    for left in _left(target):
        if left.name.endswith(_FORMER) and whole(left):
            left.rename(target)
            return


def sweep(target: Path) -> None:
    """Remove what killed runs have left beside a place."""
    for left in _left(target):
        with contextlib.suppress(OSError), _lock(left, wait=False):
            shutil.rmtree(left, ignore_errors=True)


def _swap(made: Path, target: Path, check: Callable[[Path], object]) -> None:
    """Bring ``made`` to ``target``, and remove what was there."""
    here = _stands_in(target)
    try:
        try:
            made.rename(target)  # one step where nothing is there, or an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            check(target)
            _replace(made, target, check)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        reason = f"it cannot be moved ({error.strerror}), as if it were a mount"
        raise ArgumentError(f"to = {str(target)!r}: {reason}; give a folder in it") from None
    if here is not None:
        os.chdir(target / here if (target / here).is_dir() else target)


def _replace(made: Path, target: Path, check: Callable[[Path], object]) -> None:
    if _exchange(made, target):
        try:
            check(made)  # something may have come to lie there in between
        except BaseException:
            _exchange(made, target)
            raise
        shutil.rmtree(made, ignore_errors=True)
        return
    former = made.with_name(made.name + _FORMER)
    try:
        target.rename(former)
        check(former)
        made.rename(target)
    except BaseException:
        if former.exists() and not target.exists():
            former.rename(target)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _stands_in(target: Path) -> Path | None:
    """The working folder relative to ``target``, if it lies there: it would go with the former folder."""
    with contextlib.suppress(OSError, ValueError):
        return Path.cwd().relative_to(target.resolve())
    return None


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two folders in one step; False where this system cannot."""
    name, flag = ("renamex_np", 2) if sys.platform == "darwin" else ("renameat2", 2)
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is None:
        return False
    first, second = os.fsencode(one), os.fsencode(two)
    at = -100  # AT_FDCWD
    done = call(first, second, flag) if sys.platform == "darwin" else call(at, first, at, second, flag)
    if not done:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(two))


def _create(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, paths.FILE_MODE)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A new folder beside a place, locked; removed with all that is in it if it is still there at the end."""
    while True:
        made = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
        made.mkdir(mode=paths.FOLDER_MODE)
        with contextlib.suppress(FileNotFoundError), _lock(made, wait=True):
            if not made.exists():  # a sweep beside us was quicker than our lock
                continue
            new = made.stat()
            try:
                yield made
            finally:
                with contextlib.suppress(OSError):
                    if os.path.samestat(new, made.stat()):
                        shutil.rmtree(made, ignore_errors=True)
            return


@contextlib.contextmanager
def _lock(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder's lock. Raises ``BlockingIOError`` where another process has it, unless told to wait."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _left(target: Path) -> list[Path]:
    """Folders beside a place that some run has made there."""
    pattern = re.compile(rf"\.{re.escape(target.name)}-[0-9a-f]{{8}}({_FORMER})?")
    try:
        beside = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(path for path in beside if path.is_dir() and not path.is_symlink())
