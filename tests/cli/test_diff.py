"""``kvgen diff``: two commits of a small repository, whose kvgen renders in a few lines, and a real one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvgen.diff.trees import find_checkout
from kvgen.errors import ArgumentError

# All that ``kvgen diff`` may ask of a version: assemble, source, the lists of ops, variants and targets.
STAND_IN = {
    "kvgen/__init__.py": "",
    "kvgen/ir/__init__.py": "",
    "kvgen/ir/plan.py": 'OPS = ("append", "decode", "copy")\n',
    "kvgen/passes/__init__.py": "",
    "kvgen/passes/abi.py": 'VARIANTS = {"append": ("",), "decode": ("single", "multi"), "copy": ("",)}\n',
    "kvgen/targets.py": 'TARGETS = ("cpu-avx2", "sm_90")\n',
    "kvgen/builder.py": """
import hashlib
from pathlib import Path
from types import SimpleNamespace

TEMPLATE = Path(__file__).parent / "template"

class Library:
    def __init__(self, text, target):
        self.text, self.target = text, target
        self.spec = SimpleNamespace(hash8=hashlib.sha256(text.encode()).hexdigest()[:8])

    def source(self, op, variant):
        if self.target == "sm_90" and "int8" in self.text and op == "decode":
            raise NotImplementedError("no int8 here")
        entry = f"kvgen_{op}_{self.spec.hash8}"
        body = TEMPLATE.read_text() if op == "decode" else "fixed\\n"
        words = [line for line in self.text.splitlines() if not line.startswith("#")]
        return f"// {op} of spec {self.spec.hash8}\\n\\nvoid {entry}() {words}\\n{body}"

def assemble(path, target, *, tune):
    assert tune == "off"
    text = Path(path).read_text()
    if "wrong" in text:
        raise ValueError("1 mistake in the spec:\\n  wrong")
    return Library(text, target)
""",
    "kvgen/template": "one\ntwo\nthree\n",
    "examples/same.toml": "heads = 2\n",
    "examples/comment.toml": "heads = 3\n",
    "examples/scale.toml": "heads = 4\n",
    "examples/old.toml": "heads = 5\n",
    "examples/int8.toml": "int8\n",
}
IDENTITY = {
    f"GIT_{who}_{what}": f"{who}@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


def git(root: Path, *words: str) -> str:
    plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    env = {**os.environ, **IDENTITY, **plain}
    done = subprocess.run(
        ["git", "-C", str(root), *words], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path, files: dict[str, str | None], tag: str) -> None:
    """Write files (None: remove) and commit them all under a tag."""
    for name, text in files.items():
        path = root / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", tag)
    git(root, "tag", tag)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commits: the second has another decode, and examples changed, added and removed."""
    root = tmp_path_factory.mktemp("repository")
    git(root, "init", "-q")
    commit(root, dict(STAND_IN), "before")
    changed = {
        "kvgen/template": "one\n2\nthree\n",
        "examples/comment.toml": "heads = 3\n# the same attention under another hash\n",
        "examples/scale.toml": "heads = 44\n",
        "examples/old.toml": None,
        "examples/new.toml": "heads = 6\n",
    }
    commit(root, changed, "after")
    return root


@pytest.fixture
def inside(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the repository, which the test must leave as it was: files, index, references."""
    monkeypatch.chdir(repository)

    def state() -> tuple[str, ...]:
        index = hashlib.sha256((repository / ".git/index").read_bytes()).hexdigest()
        files = sorted(str(path) for path in repository.rglob("*") if ".git" not in path.parts)
        return (index, git(repository, "status", "--porcelain"), git(repository, "show-ref"), *files)

    before = state()
    yield repository
    assert state() == before


def kvgen(*words: object, exit_code: int = 0) -> Result:
    from kvgen.cli import app

    result = CliRunner().invoke(app, ["diff", *map(str, words)])
    assert result.exit_code == exit_code, result.output
    return result


def data(*words: object, exit_code: int = 0) -> Any:
    return json.loads(kvgen(*words, "--json", exit_code=exit_code).stdout)


def statuses(found: Any, target: str = "cpu-avx2") -> dict[str, dict[str, str]]:
    """Spec -> kernel -> what became of it, on one target."""
    made: dict[str, dict[str, str]] = {}
    for row in found["kernels"]:
        if row["target"] == target:
            made.setdefault(row["spec"], {})[f"{row['op']} {row['variant']}".strip()] = row["status"]
    return made


def all_of(status: str, decode: str | None = None) -> dict[str, str]:
    return {
        "append": status,
        "decode single": decode or status,
        "decode multi": decode or status,
        "copy": status,
    }


def test_what_becomes_of_each_kernel(inside: Path) -> None:
    found = data("before", "--to", "after")
    assert statuses(found) == {
        "examples/comment.toml": all_of("header only", "changed"),
        "examples/int8.toml": all_of("unchanged", "changed"),
        "examples/new.toml": all_of("new"),
        "examples/same.toml": all_of("unchanged", "changed"),
        "examples/scale.toml": all_of("changed"),
        "examples/old.toml": all_of("gone"),
    }
    assert statuses(found, "sm_90")["examples/int8.toml"] == all_of("unchanged", "refused")
    row = next(row for row in found["kernels"] if row["status"] == "refused")
    assert (row["note"], row["diff"]) == ("NotImplementedError: no int8 here", "")
    assert found["counts"] == {
        "changed": 18, "header only": 4, "new": 8, "gone": 8, "refused": 2, "unchanged": 8
    }  # fmt: skip
    assert found["old"]["commit"] == git(inside, "rev-parse", "before")
    row = next(
        row for row in found["kernels"] if (row["spec"], row["op"]) == ("examples/same.toml", "decode")
    )
    assert (row["added"], row["removed"]) == (1, 1)
    assert "\n one\n-two\n+2\n three\n" in row["diff"]


def test_the_text_shows_an_equal_change_once(inside: Path) -> None:
    text = kvgen("before", "--to", "after").stdout
    assert text.count("\n-two\n+2\n") == 2, "once, and once where the spec changed as well"
    assert "(the same change, but for headings, in examples/comment.toml cpu-avx2 decode multi; " in text
    assert "8 unchanged" in text.splitlines()[-1]


def test_stat_names_the_kernels_without_their_diffs(inside: Path) -> None:
    text = kvgen("before", "--to", "after", "--stat").stdout
    rows = {tuple(line.split()[:4]): " ".join(line.split()[4:]) for line in text.splitlines()}
    assert rows["examples/same.toml", "cpu-avx2", "decode", "single"] == "changed 1 1"
    assert "header only" in next(line for line in text.splitlines() if "comment.toml cpu-avx2 copy" in line)
    assert "@@" not in text
    assert all("diff" not in row for row in data("before", "--to", "after", "--stat")["kernels"])


def test_only_what_is_asked_for(inside: Path) -> None:
    found = data("before", "examples/same.toml", "--to", "after", "-t", "sm_90", "--op", "decode")
    assert [(row["spec"], row["target"], row["op"], row["variant"]) for row in found["kernels"]] == [
        ("examples/same.toml", "sm_90", "decode", "single"),
        ("examples/same.toml", "sm_90", "decode", "multi"),
    ]


def test_fail_makes_a_change_an_exit_status(inside: Path) -> None:
    kvgen("before", "--to", "after", "--fail", exit_code=1)
    kvgen("after", "--fail")  # the working tree: nothing changed, and sm_90 refuses what it refused
    kvgen("before", "examples/same.toml", "--to", "after", "--op", "copy", "--fail")
    kvgen("before", "examples/comment.toml", "--to", "after", "--op", "copy", "--fail", exit_code=1)


def test_the_working_tree_is_the_default(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    template = repository / "kvgen/template"
    own = repository / "mine.toml"
    try:
        template.write_text("one\n2\nthree and more\n")
        own.write_text("heads = 9\n")
        found = data("after", "mine.toml", "examples/same.toml", "-t", "cpu-avx2")
    finally:
        own.unlink()
        git(repository, "checkout", "-q", "--", ".")
    assert statuses(found) == {
        "mine.toml": all_of("unchanged", "changed"),  # a file that no commit has: the same for both
        "examples/same.toml": all_of("unchanged", "changed"),
    }
    assert found["new"] == {"name": "working tree", "commit": git(repository, "rev-parse", "HEAD")}


def test_a_spec_that_one_version_refuses(inside: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("wrong\n")
    found = data("before", tmp_path / "spec.toml", "-t", "cpu-avx2")
    assert [(row["status"], row["op"]) for row in found["kernels"]] == [("refused", "")]
    assert found["kernels"][0]["note"].startswith("ValueError: 1 mistake in the spec")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no-such"], "GITREF 'no-such': no such commit in"),
        (["before", "--to", "HEAD:kvgen"], "GITREF 'HEAD:kvgen': no such commit in"),
        (["before", "examples/none.toml"], "SPEC 'examples/none.toml': no such file, now or then"),
        (["before", "--op", "decoed"], "did you mean decode?"),
    ],
)
def test_mistakes(inside: Path, words: list[str], says: str) -> None:
    assert says in kvgen(*words, exit_code=2).stderr


def test_a_commit_that_does_not_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    git(repository, "checkout", "-q", "-b", "broken")
    commit(repository, {"kvgen/targets.py": "import nowhere\n"}, "bad")
    git(repository, "checkout", "-q", "-")
    said = kvgen("bad", exit_code=2).stderr
    assert "the kvgen of bad does not run here: ModuleNotFoundError: No module named 'nowhere'" in said


def test_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvgen as package

    installed = tmp_path / "site-packages" / "kvgen" / "__init__.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(package, "__file__", str(installed))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ArgumentError, match="is a git checkout of kvgen; clone its repository"):
        find_checkout(tmp_path)
    git(tmp_path, "init", "-q")  # a repository, but of something else
    with pytest.raises(ArgumentError, match="is a git checkout of kvgen"):
        find_checkout(tmp_path)


def test_the_real_compiler_against_its_own_past(
    tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of this tree that has no ``kvgen diff`` yet, then a constant renamed in one template."""
    parts = ("kvgen", "runtime", "templates", "schedules", "autotune_cache")
    for name in parts:
        skip = shutil.ignore_patterns("__pycache__", "*.json" if name == "autotune_cache" else "")
        shutil.copytree(repo_root / name, tmp_path / name, symlinks=True, ignore=skip)
    (tmp_path / "examples").mkdir()
    shutil.copy(repo_root / "examples/llama3-8b-bf16.toml", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    shutil.rmtree(tmp_path / "kvgen/diff")
    commit(tmp_path, {}, "before")
    template = tmp_path / "templates/cpp/copy.cpp.jinja"
    template.write_text(f"{template.read_text()}// the end\n")
    found = data("before", "-t", "cpu-portable", "--op", "copy", "--op", "merge")
    what = {(row["target"], row["op"], row["variant"]): row["status"] for row in found["kernels"]}
    assert what.pop(("cpu-portable", "copy", "")) == "changed"
    assert set(what.values()) == {"unchanged"} and len(what) == 3
