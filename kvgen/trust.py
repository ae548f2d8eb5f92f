"""trust: whether what lies at a path may be loaded, judged by who could have put it there, as ssh does.

A shared object is code, and a manifest, a tuning record or a file of weights steers code. So a path is fit to
be loaded from where nobody but the user and root can have written: it, every folder above it and every link
on the way belong to one of those two, and no one else may write to them. A folder above it may be writable
for all if it is sticky, as ``/tmp`` is: there only a file's owner replaces it. Write access of a group counts
as the user's own where the group is the user's private one (same name, no other member), as under umask 002.

``KVGEN_TRUST`` names paths, separated as in ``PATH``, that the user vouches for with all that is in them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvgen.errors import ToolchainError, brief

VARIABLE = "KVGEN_TRUST"
"""Environment variable with paths that are trusted, no matter who owns them."""

_LONGEST = 1000
_MOST_LINKS = 40
"""As many as Linux follows."""


def fault(path: Path | str, *, below: bool = False) -> str:
    """Why nothing may be loaded from ``path``, in a few words; empty where it may, or where nothing is there.

    ``below``: also look at every file and folder in it.
    """
    if not hasattr(os, "geteuid"):  # no owners and modes of this kind
        return ""
    found, real = _walk(os.fspath(path))
    if _vouched(real):
        return ""
    if not found and below and os.path.isdir(real):
        names = (os.path.join(at, name) for at, *held in os.walk(real) for part in held for name in part)
        found = next(filter(None, (_walk(name)[0] for name in names)), "")
    return found


def require(path: Path | str, *, below: bool = False) -> None:
    """Raise ``ToolchainError`` with the reason and what would work where ``fault`` finds one."""
    if reason := fault(path, below=below):
        raise ToolchainError(f"{path}: not loaded, because {reason}; {remedy(path)}")


def remedy(path: Path | str) -> str:
    """What a user can do about a fault."""
    return f"mend its owner or mode, or set {VARIABLE}={path} if you trust all who may write there"


def vouch(path: Path) -> None:
    """Trust what this process keeps in a folder of its own, here and in the processes that it starts.

    For where no folder is fit: a system whose root belongs to another, as in some containers.
    """
    if fault(path):
        os.environ[VARIABLE] = os.pathsep.join(filter(None, (os.environ.get(VARIABLE), str(path))))


def inside(folder: Path, name: object) -> Path:
    """The path of ``name``, a relative one that a file in ``folder`` gave, if it stays in that folder.

    Raises ``ValueError`` for what is no such path: absolute, with ``..``, or led out of the folder by a link.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST or "\0" in name:
        raise ValueError(f"{brief(name)} is no path")
    if os.path.isabs(name) or ".." in name.split("/"):
        raise ValueError(f"the path {brief(name)} leads out of the folder")
    path = folder / name
    try:
        if path.resolve().is_relative_to(folder.resolve()):
            return path
    except (OSError, RuntimeError) as error:  # a ring of links, a name that is too long
        raise ValueError(f"{brief(name)} is no path ({error})") from None
    raise ValueError(f"the path {brief(name)} leads out of the folder by a link")


def _walk(path: str) -> tuple[str, str]:
    """The first fault on the way to ``path``, and where the way ends once links are followed."""
    waiting = list(reversed(os.path.join(os.getcwd(), path).split("/")))
    at, found, links = "/", _of(os.lstat("/"), "/", last=False), 0
    while waiting:
        name = waiting.pop()
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, name)
        try:
            status = os.lstat(step)
            target = os.readlink(step) if stat.S_ISLNK(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return found, os.path.join(step, *reversed(waiting))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            return found or f"{brief(step)} cannot be looked at ({why})", step
        last = not any(rest not in ("", ".") for rest in waiting)
        found = found or _of(status, step, last=last)
        if target is None:
            at = step
            continue
        links += 1
        if links > _MOST_LINKS:
            return found or f"{step} is one of too many links", step
        at = "/" if target.startswith("/") else at
        waiting += reversed(target.split("/"))
    return found, at


def _of(status: os.stat_result, path: str, *, last: bool) -> str:
    """What is wrong with the owner or mode of one file, folder or link on the way."""
    if status.st_uid not in _owners():
        return f"{path} belongs to {_user(status.st_uid)}, neither to you nor to root"
    if stat.S_ISLNK(status.st_mode) or (status.st_mode & stat.S_ISVTX and not last):
        return ""
    mode = f"(mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write to {path} {mode}"
    if status.st_mode & stat.S_IWGRP and not _private(status, path):
        return f"the group {_group(status.st_gid)} may write to {path} {mode}"
    return ""


def _owners() -> tuple[int, ...]:
    return 0, os.geteuid()


def _private(status: os.stat_result, path: str) -> bool:
    """Whether write access of the group is the owner's alone: their private group, and no list of others."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    if group.gr_gid != owner.pw_gid or group.gr_name != owner.pw_name:
        return False
    if set(group.gr_mem) - {owner.pw_name}:
        return False
    # Under an access control list the group's bits are a mask, which may let anyone through.
    with contextlib.suppress(OSError, AttributeError):
        return not os.getxattr(path, "system.posix_acl_access")
    return True


def _vouched(real: str) -> bool:
    return any(real == root or real.startswith(root.rstrip("/") + "/") for root in _roots())


def _roots() -> Iterator[str]:
    for name in os.environ.get(VARIABLE, "").split(os.pathsep):
        if os.path.isabs(name):  # a relative one would mean another folder in each process
            yield os.path.realpath(name)


def _user(number: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    return f"uid {number}"


def _group(number: int) -> str:
    import grp

    with contextlib.suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)
