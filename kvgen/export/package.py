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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvgen import __version__
from kvgen.backends.cpu import isa
from kvgen.backends.triton.process import why_absent
from kvgen.builder import assemble
from kvgen.errors import ArgumentError, ToolchainError, brief
from kvgen.export import placing
from kvgen.export.kernels import Files, export_kernels
from kvgen.export.vendor import vendored
from kvgen.ir import Spec
from kvgen.ir.schedule import Knob
from kvgen.passes.place import place
from kvgen.passes.preset import resolve as resolve_preset
from kvgen.passes.render import environment
from kvgen.passes.validate import load_spec
from kvgen.resolve import resolve_target
from kvgen.runtime import manifest as manifests

GPU_TARGETS = ("sm_80", "sm_90")
"""GPUs that an export serves unless told otherwise, or Triton is missing."""


PROJECT_FILES = ("pyproject.toml", "README.md")
"""What stands beside the package."""

TAKEN = frozenset({"kvgen", "numpy", "torch", "triton", "jinja2", "sympy"})
"""Names that an export would hide from itself or from its users."""


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
    """The CPU rows that this machine can run, best first, and ``GPU_TARGETS`` where Triton is installed."""
    have = isa.cpu_features()
    rows = [row.target for row in isa.ROWS.values() if have.issuperset(row.required)]
    return (*rows, *GPU_TARGETS) if why_absent() is None else tuple(rows)


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
    check_name(package)
    folder = Path(to)
    placing.recover(folder, holds_export)
    check_folder(folder, force=force)
    chosen = list(dict.fromkeys(resolve_target(target).name for target in targets or default_targets()))
    spec = _one_layout(spec, chosen)
    files: Files = {}
    kernels = {}
    for at, target in enumerate(chosen):
        if progress is not None:
            progress(target, at, len(chosen))
        library = assemble(spec, target, tune="cache", schedule=schedule)
        kernels[target], own = export_kernels(library)
        files |= own
    found = library.frequencies() if spec.attention.rope else None
    steps = (tuple(found[0]), found[1]) if found else None
    manifest = manifests.Manifest(__version__, spec, place(spec), kernels, steps)
    files[manifests.NAME] = manifest.dump().encode()
    files |= {path: text.encode() for path, text in vendored(package, __version__).items()}
    context = {"package": package, "manifest": manifest, "spec": spec, "storage": partial(storage, spec)}
    files["__init__.py"] = _render("__init__.py", context)
    whole = {f"{package}/{path}": data for path, data in files.items()}
    whole |= {path: _render(path, context) for path in PROJECT_FILES}
    placing.put(folder, whole, partial(check_folder, force=force))
    return Package(folder, package, manifest, len(whole), sum(map(len, whole.values())))


def storage(spec: Spec, side: str) -> str:
    """The formats of ``"k"`` or ``"v"``, in words."""
    return " + ".join(part.quant.format for part in spec.segments(side))


def _one_layout(spec: Spec, targets: Sequence[str]) -> Spec:
    """``spec`` with its preset resolved. A package has one page record, so all targets must want the same."""
    found = {target: resolve_preset(spec, resolve_target(target)) for target in targets}
    first = found[targets[0]]
    if other := next((target for target, own in found.items() if own != first), None):
        raise ArgumentError(
            f"layout = {spec.cache.preset!r}: another one for {other} than for {targets[0]}, and a package "
            "has one; export them one by one, or write the layout out (kvgen show SPEC --target T prints it)"
        )
    return first


def package_name(label: str) -> str:
    """A spec's label as the name of a package: ``llama3-8b-int8`` -> ``llama3_8b_int8``."""
    name = re.sub(r"\W+", "_", label, flags=re.ASCII).strip("_").lower()
    return name if name and not name[0].isdigit() else f"kernels_{name}".rstrip("_")


def check_name(package: str) -> None:
    """Refuse what is no name for a package, or one that would hide a package everybody imports."""
    fits = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", package)
    if not fits or keyword.iskeyword(package):
        raise ArgumentError(
            f"name = {brief(package)}: no package name; give letters, digits and _, such as my_kernels"
        )
    if package in TAKEN or package in sys.stdlib_module_names:
        raise ArgumentError(f"name = {package!r}: would hide the package {package}; give another name")


def check_folder(folder: Path, *, force: bool) -> None:
    """Refuse a folder that a new export cannot replace without destroying what no export wrote."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ArgumentError(f"to = {str(folder)!r}: there is something that is no folder; give a new folder")
    held = sorted(folder.iterdir()) if folder.exists() else []
    if not held:
        return
    packages = [path for path in held if path.is_dir() and is_export(path)]
    if not packages:
        raise ArgumentError(f"to = {str(folder)!r}: not empty, and no export; give a new or empty folder")
    if not force:
        raise ArgumentError(f"to = {str(folder)!r}: holds an export already; replace it with --force")
    # What pip leaves behind when it builds the project is no loss either.
    built = [folder / "build", *folder.glob("*.egg-info")]
    mine = {*packages, *(folder / name for name in PROJECT_FILES), *built}
    if foreign := [path for path in held if path not in mine]:
        reason = f"beside an export it holds {foreign[0].name}, which no export wrote"
        raise ArgumentError(f"to = {str(folder)!r}: {reason}; move that away or give another folder")


def holds_export(folder: Path) -> bool:
    """Whether a folder holds an earlier export and nothing else."""
    try:
        check_folder(folder, force=True)
    except ArgumentError:
        return False
    return any(folder.iterdir())


def is_export(folder: Path) -> bool:
    """Whether a folder is a package that ``export`` wrote, with nothing added."""
    try:
        # What it means does not matter here: a codec of its may mean something else by now.
        targets = manifests.read_body(folder)["targets"]
        files = {
            file["path"] for of in targets.values() for k in of for file in (k["source"], *k["binaries"])
        }
    except (ToolchainError, KeyError, TypeError, AttributeError):
        return False
    files |= {"__init__.py", manifests.NAME}
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return all(
        path.relative_to(folder).as_posix() in files or path.is_relative_to(folder / "_kvgen")
        for path in found
    )


def _render(path: str, context: Mapping[str, Any]) -> bytes:
    return environment().get_template(f"export/{path}.jinja").render(context).encode()
