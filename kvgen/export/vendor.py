"""vendor: the modules of kvgen that an exported package needs, found by their imports, under a new name.

The exported package runs the same runtime as a live build, not a second version of it: the modules that
``ROOTS`` import (and what those import, inside functions too) are copied with ``kvgen`` renamed. The compiler
is not among them: a test holds that no module of the front end is ever reached.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("kvgen.runtime.loader", "kvgen.runtime.attend", "kvgen.runtime.engine")
"""What an exported package offers: its ops, and the batched runtime over them."""

_INIT = '"""The part of kvgen {version} that runs exported kernels, copied under another name."""\n'
_NAME = re.compile(r"\bkvgen(?=\.[a-z])")


def modules() -> dict[str, Path]:
    """Files of all modules that ``ROOTS`` reach, by module name, packages included, ``kvgen`` itself not."""
    found: dict[str, Path] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name in found or name == "kvgen":
            continue
        found[name] = _file(name)
        waiting += [name.rpartition(".")[0], *_imported(found[name])]
    return dict(sorted(found.items()))


def vendored(package: str, version: str) -> dict[str, str]:
    """Texts by path relative to the package, under ``_kvgen/``; ``kvgen`` is ``<package>._kvgen`` in them."""
    texts = {"_kvgen/__init__.py": _INIT.format(version=version)}
    for name, path in modules().items():
        inner = name.removeprefix("kvgen.").replace(".", "/")
        file = f"{inner}/__init__.py" if path.name == "__init__.py" else f"{inner}.py"
        texts[f"_kvgen/{file}"] = _renamed(path, package)
    return texts


def _file(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name}: no such module", name=name)
    return Path(spec.origin)


def _imported(path: Path) -> Iterator[str]:
    """Modules of kvgen that a file imports, except those it needs for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _reached(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("kvgen."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvgen":
            module = str(node.module)
            yield module
            for alias in node.names:
                if _is_module(f"{module}.{alias.name}"):
                    yield f"{module}.{alias.name}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is no package: a name in a module
        return False


def _reached(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _reached(child)


def _renamed(path: Path, package: str) -> str:
    """The text with every import of kvgen renamed; prose that mentions ``kvgen.x`` stays as it is."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                line = _NAME.sub(f"{package}._kvgen", lines[number])
                line = re.sub(r"\bfrom kvgen import", f"from {package}._kvgen import", line)
                lines[number] = line
    return "".join(lines)
