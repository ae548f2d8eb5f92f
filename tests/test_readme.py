"""What the README and docs/ show runs as pasted, and every command in them is one that kvgen takes.

docs/codecs.md and docs/variants.md have tests of their own, for what they say beside their samples.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvgen.builder import assemble
from kvgen.cli import app
from kvgen.models.extras import installed
from kvgen.passes.validate import load_spec
from tests.support.documents import ROOT, blocks, commands, in_table

DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]

FIRST, TERMS, KIVI, KEYS = (tomllib.loads(text) for text in blocks("README.md", "toml"))

BUILD, APPEND_TERMS, APPEND_RAW, ENGINE = blocks("README.md", "python")

pytestmark = pytest.mark.filterwarnings("ignore::kvgen.tune.choose.UntunedWarning")


def run(sample: str, scope: dict[str, Any]) -> dict[str, Any]:
    exec(compile(sample, "README.md", "exec"), scope)  # noqa: S102 - text of this project
    return scope


def test_the_specs() -> None:
    assert load_spec(FIRST) == load_spec(ROOT / "examples/llama3-8b-int8.toml")
    assert [p.name for p in load_spec(FIRST | TERMS).attention.params] == ["lead", "sink_logit", "slope"]
    assert load_spec(FIRST | KIVI).cache.raw is not None
    cache = FIRST["cache"] | KEYS["cache"]
    spec = load_spec({**FIRST, "cache": cache})
    assert spec.cache.k.transform == "hadamard" and len(spec.segments("v")) == 2


@pytest.fixture(scope="module")
def first() -> dict[str, Any]:
    """The names that the first sample leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return run(BUILD, {})


def test_the_first_sample(first: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    k, v = first["k"], first["v"]
    assert k.shape == v.shape == (100, 8, 128) and first["out"].isfinite().all()
    assert first["lib"].spec == load_spec(FIRST)


def test_the_samples_that_go_on_from_it(first: dict[str, Any]) -> None:
    import torch

    lib = assemble(load_spec(FIRST | TERMS), "cpu")
    found = run(APPEND_TERMS, {**first, "lib": lib, "cache": lib.new_cache(8), "slots": torch.arange(100)})
    assert found["out"].isfinite().all()
    lib = assemble(load_spec(FIRST | KIVI), "cpu")
    scope = {**first, "lib": lib, "q_starts": torch.tensor([0, 100], dtype=torch.int32)}
    found = run(APPEND_RAW, scope)
    assert found["cache"].k.any() and found["cache"].k_raw.any()  # the last tokens are not quantised yet


@pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")
def test_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tiny checkpoint in place of the packaged weights."""
    from kvgen.models.threads import using_threads
    from tests.support.checkpoints import SHAPES, make_checkpoint

    folder = make_checkpoint(tmp_path, tokenizer=True, **SHAPES["gqa-tied"])
    assert '"smollm2"' in ENGINE
    with using_threads(1):
        found = run(ENGINE.replace('"smollm2"', repr(str(folder))), {})
    assert len(found["tokens"]) == 2 and found["engine"].idle
    assert all(1 <= len(tokens) <= 16 for tokens in found["tokens"].values())


KVGEN = sorted(
    {(document, line) for document in DOCUMENTS for line in commands(document) if line.startswith("kvgen ")}
    | {("README.md", line) for line in in_table("README.md")}
)


@pytest.mark.parametrize("line", [line for _, line in KVGEN], ids=[": ".join(each) for each in KVGEN])
def test_kvgen_takes_the_command(line: str) -> None:
    """Names of commands and options, kinds of values, numbers of arguments; nothing is run."""
    line = re.sub(r" > \S+$", "", line).replace("[", "").replace("]", "")
    words = [word.partition("/")[0] if "/" in word and word.isalpha() else word for word in shlex.split(line)]
    words = [re.sub(r"^(quick)/full$", r"\1", word).rstrip(",") for word in words]
    group: Any = typer.main.get_command(app)
    context = group.make_context("kvgen", [], resilient_parsing=True)
    name, command, rest = group.resolve_command(context, words[1:])
    command.make_context(name, rest)


def test_make_has_the_targets() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = {
        line.split()[1] for document in DOCUMENTS for line in commands(document) if line.startswith("make ")
    }
    assert told and told <= known


def test_pip_lines_name_what_pyproject_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for document in DOCUMENTS for line in commands(document) if line.startswith("pip ")]
    extras = {name for line in lines for name in re.findall(r"\.\[(\w+)\]", line)}
    assert extras and extras <= set(project["optional-dependencies"])
    lean = next(line for line in lines if line.startswith("pip install torch "))
    needed = {re.split(r"[><=]", name)[0] for name in project["dependencies"]}
    assert set(lean.split()[2:]) == needed - {"triton"}
