"""kvgen run --print-spec: what it prints is the spec that a run uses, and other commands read it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.commands.print_spec import toml_lines
from kvgen.models.checkpoint import read_shape
from kvgen.models.extras import installed
from kvgen.models.pages import specs_for
from kvgen.models.presets import PAGES
from kvgen.passes.validate import load_spec
from tests.support.checkpoints import FAMILY_SHAPES, SHAPES, make_checkpoint

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

Kvgen = Callable[..., Any]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def make(family: str, **changes: Any) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("models") / f"tiny {family}", family=family, **changes)

    shapes = {family: FAMILY_SHAPES[family] for family in ("gemma2", "gpt_oss", "deepseek_v3")}
    return {
        family: make(family, **changes)
        for family, changes in {"llama": {**SHAPES["gqa-tied"], "head_dim": 64}, **shapes}.items()
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_text_of_a_spec_is_the_spec(path: Path, tmp_path: Path) -> None:
    spec = load_spec(path)
    file = tmp_path / "spec.toml"
    file.write_text("\n".join(toml_lines(spec.to_dict())))
    assert load_spec(file) == spec


@pytest.mark.parametrize("pages", [None, *PAGES])
def test_a_model_s_spec_is_that_of_a_run(
    kvgen: Kvgen, folders: dict[str, Path], tmp_path: Path, pages: str | None
) -> None:
    folder = folders["llama"]
    file = tmp_path / "spec.toml"
    done = kvgen("run", "-m", folder, "--print-spec", *(["--pages", pages] if pages else []))
    assert done.exit_code == 0, done.output
    file.write_text(done.stdout)
    want = specs_for(read_shape(folder), pages or "f32")[0]
    got = load_spec(file)
    assert (got.hash, got.name) == (want.hash, f"tiny-llama-{want.name}")
    assert done.stdout.startswith("# For all 2 layers.\n")
    assert "[attention]" in done.stdout and "[cache.k]\n" in done.stdout


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_each_layer_of_a_model(kvgen: Kvgen, folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    want = specs_for(read_shape(folders[family]), "f32", page_size=4)
    for layer, spec in enumerate(want):
        done = kvgen("run", "-m", folders[family], "--print-spec", "--layer", layer, "--page-size", 4)
        assert done.exit_code == 0, done.output
        (tmp_path / "spec.toml").write_text(done.stdout)
        assert load_spec(tmp_path / "spec.toml").hash == spec.hash
    other = "# Layer 0 has another: --print-spec --layer 0\n# Layer 1: this spec."
    assert (other in done.stdout) == (family != "deepseek_v3")


def test_other_commands_read_it(
    kvgen: Kvgen, kvgen_json: Kvgen, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(kvgen("run", "-m", folders["gpt_oss"], "--print-spec", "--pages", "int8").stdout)
    shown = kvgen_json("show", file)
    assert shown["proven"] is True
    again = kvgen("run", "-m", folders["gpt_oss"], "--print-spec", "--spec", file)
    assert again.exit_code == 0, again.output
    assert tomllib.loads(again.stdout) == tomllib.loads(file.read_text())
    data = kvgen_json("run", "-m", folders["gpt_oss"], "--print-spec", "--pages", "int8")
    assert load_spec(data["spec"]) == load_spec(file)


def test_weights_are_not_read(kvgen: Kvgen, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bare", **SHAPES["gqa-tied"])
    (folder / "model.safetensors").unlink()
    assert kvgen("run", "-m", folder, "--print-spec").exit_code == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--print-spec", "Hello"], "PROMPT: --print-spec runs nothing; leave it out"),
        (["--print-spec", "--ids", "1,2"], "--ids: --print-spec runs nothing"),
        (["--print-spec", "--layer", "2"], "--layer 2: the model has 2 layers; give 0 to 1"),
        (["--layer", "1", "Hello"], "--layer 1: only --print-spec has one"),
        (["--print-spec", "--pages", "int9"], "--pages int9: "),
    ],
)
def test_what_is_refused(kvgen: Kvgen, folders: dict[str, Path], options: list[str], match: str) -> None:
    done = kvgen("run", "-m", folders["llama"], *options)
    assert done.exit_code == 2 and match in done.stderr
