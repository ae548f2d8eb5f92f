"""package: a spec and targets -> a folder with a Python package that runs without kvgen.

::

    DIR/pyproject.toml README.md      so that `pip install DIR` works
    DIR/<name>/__init__.py            the ops, loaded and registered with torch
    DIR/<name>/manifest.json          spec, page record, kernels with schedules, arguments and digests
    DIR/<name>/cpu/<target>/          readable C++ and shared objects
    DIR/<name>/triton/<target>/       readable Triton and cubins
    DIR/<name>/_kvgen/                the runtime that loads them
"""

from __future__ import annotations

import keyword
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen import __version__
from kvgen.backends.cpu import isa
from kvgen.builder import assemble
from kvgen.errors import ArgumentError
from kvgen.export.kernels import Files, export_kernels
from kvgen.export.vendor import vendored
from kvgen.ir import Spec
from kvgen.ir.schedule import Knob
from kvgen.passes.place import place
from kvgen.passes.render import environment
from kvgen.passes.validate import load_spec
from kvgen.resolve import resolve_target
from kvgen.runtime import manifest as manifests

GPU_TARGETS = ("sm_80", "sm_90")
"""GPUs that an export serves unless told otherwise."""


@dataclass(frozen=True)
class Package:
    """What was written."""

    folder: Path
    name: str
    """The package to import."""
    manifest: manifests.Manifest
    files: int
    nbytes: int


def default_targets() -> tuple[str, ...]:
    """The CPU rows that this machine can run, best first, and ``GPU_TARGETS``."""
    have = isa.cpu_features()
    rows = [row.target for row in isa.ROWS.values() if have.issuperset(row.required)]
    return (*rows, *GPU_TARGETS)


def export(
    spec: Spec | str | Path | Mapping[str, Any],
    to: Path | str,
    *,
    targets: Sequence[str] = (),
    name: str = "",
    schedule: Mapping[str, Mapping[str, Knob]] | None = None,
    force: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Package:
    """Write the kernels of ``spec`` for ``targets`` as a Python package into the folder ``to``.

    Schedules are the tuned ones where there are any. The folder must be new or empty; with ``force``, an
    earlier export is replaced. It appears whole or not at all. ``progress`` gets target, done, total.
    Raises ``ArgumentError``, ``SpecError``, ``UnsupportedError``, ``ToolchainError``.
    """
    spec = spec if isinstance(spec, Spec) else load_spec(spec)
    package = name or package_name(spec.name)
    if not package.isidentifier() or keyword.iskeyword(package) or package == "kvgen":
        raise ArgumentError(f"name = {package!r}: no package name; give an identifier such as my_kernels")
    folder = Path(to)
    check_folder(folder, force=force)
    chosen = list(dict.fromkeys(resolve_target(target).name for target in targets or default_targets()))
    files: Files = {}
    kernels = {}
    for at, target in enumerate(chosen):
        if progress is not None:
            progress(target, at, len(chosen))
        library = assemble(spec, target, tune="cache", schedule=schedule)
        kernels[target], own = export_kernels(library)
        files |= own
    manifest = manifests.Manifest(__version__, spec, place(spec), kernels)
    files[manifests.NAME] = manifest.dump().encode()
    files |= {path: text.encode() for path, text in vendored(package, __version__).items()}
    context = {"package": package, "manifest": manifest, "spec": spec}
    files["__init__.py"] = _render("__init__.py", context)
    whole = {f"{package}/{path}": data for path, data in files.items()}
    whole |= {path: _render(path, context) for path in ("pyproject.toml", "README.md")}
    _write(folder, whole)
    return Package(folder, package, manifest, len(whole), sum(map(len, whole.values())))


def package_name(label: str) -> str:
    """A spec's label as the name of a package: ``llama3-8b-int8`` -> ``llama3_8b_int8``."""
    name = re.sub(r"\W+", "_", label, flags=re.ASCII).strip("_").lower()
    return name if name and not name[0].isdigit() else f"kernels_{name}".rstrip("_")


def check_folder(folder: Path, *, force: bool) -> None:
    """Refuse a place where an export would destroy something."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ArgumentError(f"to = {str(folder)!r}: there is something that is no folder; give a new folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    mine = any(folder.glob(f"*/{manifests.NAME}")) and (folder / "pyproject.toml").exists()
    if not mine:
        raise ArgumentError(f"to = {str(folder)!r}: not empty, and no export; give a new or empty folder")
    if not force:
        raise ArgumentError(f"to = {str(folder)!r}: holds an export already; replace it with --force")


def _render(path: str, context: Mapping[str, Any]) -> bytes:
    return environment().get_template(f"export/{path}.jinja").render(context).encode()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make the folder under another name and move it into place."""
    target = folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    former = made.with_name(f"{made.name}-former")
    made.mkdir()
    try:
        for path, data in files.items():
            file = made / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        if target.exists():
            target.rename(former)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if former.exists() and not target.exists():
            former.rename(target)
        raise
    if former.exists():
        shutil.rmtree(former)
