"""trees: the source trees of two versions, and the kernels that each renders by its own code.

A commit is unpacked into a temporary folder by ``git archive``: neither the working tree nor anything that
git keeps is touched.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError, ToolchainError, brief

Key = tuple[str, str, str, str]
"""Label of a spec, target, op, variant."""


@dataclass(frozen=True)
class Tree:
    """The sources of one version of kvgen."""

    name: str
    """As the user called it: ``HEAD~3``, ``working tree``."""
    commit: str
    """Full hash of the commit; of the working tree, the one it is based on."""
    root: Path
    """The folder that holds the package ``kvgen``."""


@dataclass(frozen=True)
class Rendering:
    """What a tree made of specs."""

    texts: Mapping[Key, str]
    """Rendered sources."""
    refused: Mapping[Key, str]
    """Why a kernel was not rendered; with an empty op: why nothing of a spec was on a target."""
    hashes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By label, the hashes of the spec that texts quote."""


def find_checkout(start: Path | None = None) -> Path:
    """The checkout of kvgen around ``start`` (default: the current folder), else that of the running package.

    Raises ``ArgumentError`` where there is none, ``ToolchainError`` without git.
    """
    import kvgen

    package = Path(kvgen.__file__).resolve().parent.parent
    for folder in (start or Path.cwd(), package):
        found = _git(folder, "rev-parse", "--show-toplevel", check=False)
        top = Path(found.stdout.decode(errors="surrogateescape").strip())
        if not found.returncode and (top / "kvgen" / "builder.py").is_file():
            return top
    raise ArgumentError(
        f"kvgen diff: neither {start or Path.cwd()} nor the package in {package} is a git checkout of kvgen; "
        "clone its repository and run the command there"
    )


def working_tree(root: Path) -> Tree:
    """The files of a checkout as they are now, committed or not."""
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
    return Tree("working tree", head.stdout.decode().strip(), root)


@contextlib.contextmanager
def commit_tree(root: Path, ref: str) -> Iterator[Tree]:
    """The tree of a commit, in a temporary folder; ``ArgumentError`` where ``ref`` names none."""
    found = _git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", check=False
    )
    commit = found.stdout.decode().strip()
    if found.returncode or not commit:
        shallow = _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
        hint = "this clone is shallow: git fetch --unshallow" if shallow else "git log shows what there is"
        raise ArgumentError(f"GITREF {brief(ref)}: no such commit in {root}; {hint}")
    packed = _git(root, "archive", "--format=tar", commit).stdout
    with tempfile.TemporaryDirectory(prefix="kvgen-diff-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, filter="data")
            else:  # Python before 3.11.4; the archive is git's own
                archive.extractall(folder)
        if not Path(folder, "kvgen", "builder.py").is_file():
            raise ArgumentError(f"GITREF {brief(ref)}: that commit has no kvgen/builder.py to render with")
        yield Tree(ref, commit, Path(folder).resolve())


def _git(root: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
    except FileNotFoundError:
        raise ToolchainError("kvgen diff needs git, which is not on PATH") from None
    if check and done.returncode:
        raise ToolchainError(f"git {words[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done


def spec_files(tree: Tree, other: Tree, root: Path, named: Sequence[str]) -> dict[str, str]:
    """Label -> path of the specs that ``tree`` renders: its own examples, or its own versions of those named.

    A named file that ``tree`` or ``other`` lacks, as it was never committed, is the same file for both. One
    that only the other has is left out. Labels of files inside the checkout are relative to it.
    """
    if not named:
        return {path.relative_to(tree.root).as_posix(): str(path) for path in _examples(tree.root)}
    found = {}
    for name in named:
        path = Path(name).resolve()
        label = path.relative_to(root).as_posix() if path.is_relative_to(root) else name
        own = tree.root / label
        if own.is_file():
            found[label] = str(own)
        elif path.is_file():
            found[label] = str(path)
        elif not (other.root / label).is_file():
            raise ArgumentError(
                f"SPEC {brief(name)}: no such file, now or then; give the path of a TOML spec"
            )
    return found


def _examples(root: Path) -> list[Path]:
    return sorted((root / "examples").glob("*.toml"))


def render_trees(
    trees: Sequence[Tree], specs: Sequence[Mapping[str, str]], targets: Sequence[str], ops: Sequence[str]
) -> list[Rendering]:
    """Render the specs of each tree by its own code, all trees at once.

    No targets or ops: all that a tree has. Raises ``ToolchainError`` where a tree's code does not even start.
    """
    program = (resources.files("kvgen.diff") / "renderer.py").read_text()
    with tempfile.TemporaryDirectory(prefix="kvgen-diff-") as name:
        folder, started = Path(name), []
        for at, (tree, files) in enumerate(zip(trees, specs, strict=True)):
            request = {"specs": dict(files), "targets": list(targets) or None, "ops": list(ops) or None}
            (folder / f"{at}.request").write_text(json.dumps(request))
            command = [sys.executable, "-c", program, str(folder / f"{at}.request"), str(folder / f"{at}")]
            started.append(
                subprocess.Popen(
                    command, cwd=tree.root, env=_environment(tree.root), stderr=subprocess.PIPE, text=True
                )
            )
        found = []
        for at, (tree, process) in enumerate(zip(trees, started, strict=True)):
            _, said = process.communicate()
            if process.returncode:
                last = (said.strip().splitlines() or ["it said nothing"])[-1]
                raise ToolchainError(f"the kvgen of {tree.name} does not run here: {last}")
            found.append(_read(json.loads((folder / f"{at}").read_text())))
        return found


def _environment(root: Path) -> dict[str, str]:
    """The tree's modules before any others; nothing of kvgen's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVGEN_", "PYTHON"))}
    return kept | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


def _read(result: Any) -> Rendering:
    texts: dict[Key, str] = {}
    refused: dict[Key, str] = {}
    for label, target, op, variant, text, error in result["kernels"]:
        (refused if error else texts)[label, target, op, variant] = error or text
    return Rendering(texts, refused, result["hashes"])
