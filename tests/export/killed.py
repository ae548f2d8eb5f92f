"""Runs in a process of its own: an export into a folder, killed at every step that changes the file system.

Arguments: an empty folder to work in, ``exchange`` or ``moves`` (a system that cannot exchange folders).
Prints a line for each kill: its number, what was the last step, and what it found wrong; then the count.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvgen.export import placing
from kvgen.export.package import check_folder, holds_export
from kvgen.runtime.manifest import SCHEMA, sealed

work, how = Path(sys.argv[1]), sys.argv[2]
STEPS = ("rename", "replace", "mkdir", "rmdir", "unlink", "chmod", "open")

Tree = dict[str, bytes]


def export_of(name: str, mark: str) -> Tree:
    manifest = json.dumps(sealed({"schema": SCHEMA, "targets": {}, "mark": mark}))
    files = {f"{name}/manifest.json": manifest, f"{name}/__init__.py": mark, f"{name}/_kvgen/cpu/a.py": mark}
    files |= {"pyproject.toml": mark, "README.md": mark}
    return {path: text.encode() for path, text in files.items()}


def tree(folder: Path) -> Tree:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(target: Path, files: Tree, *, force: bool = True) -> None:
    placing.recover(target, holds_export)
    check_folder(target, force=force)
    placing.put(target, files, partial(check_folder, force=force))


def killed_at(number: int, task: Callable[[], None]) -> tuple[bool, str]:
    """Run ``task`` in a child that ends, as by kill -9, before its step of this number; whether it did."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        with os.fdopen(reads) as stream:
            said = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 77), said
        return status == 77, said
    seen = 0

    def step(name: str) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.write(writes, name.encode())
            os._exit(77)

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                step(f"{name} {args[0]}")
            return real(*args, **kwargs)

        return call

    try:
        for name in STEPS:
            setattr(os, name, counted(name, getattr(os, name)))
        swap = placing._exchange
        placing._exchange = lambda *two: how == "exchange" and (step("exchange") or swap(*two))
        task()
        os._exit(0)
    finally:  # only after an error
        os.write(writes, repr(sys.exception()).encode())
        os._exit(1)


def case(name: str, old: Tree | None, new: Tree) -> int:
    target = work / name / "out"
    number = 0
    while True:
        number += 1
        shutil.rmtree(work / name, ignore_errors=True)
        target.parent.mkdir(parents=True)
        if old is not None:
            target.mkdir()
            for path, data in old.items():
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).write_bytes(data)
        came, last = killed_at(number, lambda: run(target, new))
        found = tree(target) if target.exists() else None
        fine = found in (old, new) or (not old and not found)
        if how == "moves" and found is None and old:
            placing.recover(target, holds_export)
            fine = tree(target) == old
        again = export_of("again", "third")
        run(target, again)
        left = sorted(path.name for path in target.parent.iterdir())
        wrong = "" if fine else f"neither the old nor the new is there: {sorted(found or ())}"
        if tree(target) != again or left != ["out"]:
            wrong += f" the next run left {left}"
        print(f"{name} {number} {last}: {wrong or 'fine'}")
        if not came:
            assert found == new
            return number - 1


OLD = {**export_of("small", "old"), "small/__pycache__/x.pyc": b"", "small.egg-info/PKG-INFO": b""}
count = case("over", OLD, export_of("small", "new"))
count += case("renamed", OLD, export_of("other", "new"))
count += case("fresh", None, export_of("small", "new"))
count += case("empty", {}, export_of("small", "new"))
print(count)
