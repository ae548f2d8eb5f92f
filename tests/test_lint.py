"""Style, types and hygiene of the repository, as tests, so that one command says all."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_LINES = 350

# An absolute path that begins like one of these belongs to whoever wrote it.
MACHINE_PATHS = re.compile(r"(?<![\w.$})/-])/(?:work|home/\w+|root|Users/\w+)/")
REGISTRIES = re.compile("|".join([r"pypi\.org", r"pythonhosted\.org", r"download\.pytorch\.org"]))

# `import kvgen` and `kvgen list | show | explain` must be quick, and work where these are absent.
HEAVY = ("torch", "triton", "transformers", "matplotlib", "pandas", "scipy")
# Programs that run in a process of their own and live on triton. Who imports one is found all the same: the
# import of triton is then laid to that module.
WORKERS = "kvgen.backends.triton.worker_"
# These live on tensors, and are imported by the first cache.
QUICK = ("kvgen.runtime.quick", "kvgen.runtime.custom_ops")
# The runtime loads built libraries: it needs no compiler front end.
FRONT_END = ("jinja2", "sympy")


def run_tool(root: Path, name: str, *args: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name} in this environment (pip install -e '.[test]')")
    done = subprocess.run(
        [sys.executable, "-m", name, *args], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"`{name} {' '.join(args)}` says:\n{done.stdout}{done.stderr}", pytrace=False)


def test_ruff(repo_root: Path) -> None:
    run_tool(repo_root, "ruff", "check", "--quiet", "--output-format=concise", ".")


def test_mypy(repo_root: Path) -> None:
    run_tool(repo_root, "mypy", "--no-error-summary")


def tracked_files(root: Path) -> list[Path]:
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    paths = [root / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(MACHINE_PATHS, "paths of one machine"), (REGISTRIES, "hosts of a package registry")],
    ids=["machine-paths", "registry-hosts"],
)
def test_tracked_files_name_no(repo_root: Path, pattern: re.Pattern[str], what: str) -> None:
    hits = []
    for path in tracked_files(repo_root):
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if path != Path(__file__).resolve() and (match := pattern.search(line)):
                hits.append(f"{path.relative_to(repo_root)}:{number}: {match.group()}")
    assert not hits, f"{what} in tracked files:\n" + "\n".join(hits)


def test_no_build_products_are_tracked(repo_root: Path) -> None:
    products = re.compile(
        r"(^|/)(__pycache__|build|dist|\.venv[^/]*|[^/]+\.egg-info)/|\.(pyc|so|o|cubin|hsaco)$"
    )
    names = [path.relative_to(repo_root).as_posix() for path in tracked_files(repo_root)]
    assert not [name for name in names if products.search(name)]


def source_files(root: Path) -> Iterator[Path]:
    for folder in ("kvgen", "runtime", "templates"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".jinja") and "__pycache__" not in path.parts:
                yield path


def test_files_stay_small(repo_root: Path) -> None:
    """One concept a file: past this size a file holds two."""
    lengths = {
        path.relative_to(repo_root): len(path.read_text().splitlines()) for path in source_files(repo_root)
    }
    long = {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"files above {MAX_LINES} lines: {long}"


def module_names(root: Path) -> list[str]:
    names = []
    for folder, package in (("kvgen", "kvgen"), ("runtime", "kvgen.runtime")):
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return sorted(names)


# Imports each module with `banned` packages made absent, and reports who asked for one or failed otherwise.
# Absent, not merely watched: one interpreter can then check all modules, as none loads it for a later one.
IMPORT_ALL = """
import importlib, importlib.abc, json, sys
names, banned = json.loads(sys.stdin.read())
asked = []
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in banned:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r} (made absent)", name=name)
sys.meta_path.insert(0, Absent())
report = {}
for name in names:
    asked.clear()
    try:
        importlib.import_module(name)
    except Exception as error:
        report[name] = f"{type(error).__name__}: {error}"
    if asked:
        report[name] = "imports " + ", ".join(sorted(set(asked)))
print(json.dumps(report))
"""


def import_all(root: Path, names: list[str], banned: tuple[str, ...]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input=json.dumps([names, banned]),
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_import_kvgen_is_light(repo_root: Path) -> None:
    code = f"import sys, kvgen; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]", "import kvgen must stay quick and work without torch and triton"


def test_every_module_imports_without_torch_and_triton(repo_root: Path) -> None:
    names = [name for name in module_names(repo_root) if not name.startswith((WORKERS, *QUICK))]
    report = import_all(repo_root, names, HEAVY)
    assert not report, "import these lazily, inside the function that needs them:\n" + "\n".join(
        f"{name}: {fault}" for name, fault in report.items()
    )


def test_the_runtime_needs_no_compiler_front_end(repo_root: Path) -> None:
    names = [name for name in module_names(repo_root) if name.startswith("kvgen.runtime")]
    assert not import_all(repo_root, names, FRONT_END)


def dangerous(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Ways in which text becomes code. Specs are passed around as files: reading one must run nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
                    yield node.lineno, f"imports {name}"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            keywords = {word.arg: word.value for word in node.keywords}
            if isinstance(node.func, ast.Name) and called in ("eval", "exec"):
                yield node.lineno, f"calls {called}()"
            elif called == "parse_expr":
                yield node.lineno, "calls sympy's parse_expr(), which evaluates its text"
            elif called == "sympify" and "strict" not in keywords:
                yield node.lineno, "calls sympify() without strict=True, which evaluates text"
            elif isinstance(value := keywords.get("shell"), ast.Constant) and value.value is True:
                yield node.lineno, f"calls {called}(shell=True)"


def test_no_text_becomes_code(repo_root: Path) -> None:
    hits = [
        f"{path.relative_to(repo_root)}:{line}: {what}"
        for path in source_files(repo_root)
        if path.suffix == ".py"
        for line, what in dangerous(ast.parse(path.read_text(), str(path)))
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    "text",
    ["eval('1')", "import pickle", "from pickle import loads", "sympy.sympify(t)", "run(c, shell=True)"],
)
def test_dangerous_text_is_found(text: str) -> None:
    assert list(dangerous(ast.parse(text)))


def test_harmless_text_is_not() -> None:
    harmless = "model.eval(); re.compile('x'); sympify(t, strict=True); run(c, shell=False)"
    assert not list(dangerous(ast.parse(harmless)))
