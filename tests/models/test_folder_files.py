"""Files of a checkpoint folder: names and links stay inside; Hugging Face's own cache works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import ArgumentError
from kvgen.models.checkpoint import load_model, load_tokenizer
from kvgen.models.extras import installed
from tests.models.test_checkpoint import change_config

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(checkpoint: Any, tmp_path: Path) -> Path:
    """A checkpoint of several files, and one of the same weights beside its folder."""
    folder = tmp_path / "model"
    load_model(checkpoint("gqa-tied")).module.save_pretrained(folder, max_shard_size="100KB")
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    return folder


def _lead_out(folder: Path, name: str) -> None:
    """The first file of the index under a name that leads out, where it really is."""
    table = json.loads((folder / INDEX).read_text())
    first = sorted(set(table["weight_map"].values()))[0]
    (folder / first).rename(folder.parent / "outside.safetensors")
    files = table["weight_map"].items()
    table["weight_map"] = {key: name if file == first else file for key, file in files}
    (folder / INDEX).write_text(json.dumps(table))


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_that_names_files_outside(sharded: Path, tmp_path: Path, absolute: bool) -> None:
    _lead_out(sharded, str(tmp_path / "outside.safetensors") if absolute else "../outside.safetensors")
    with pytest.raises(ArgumentError, match=rf"{INDEX}: weight_map\.\S+ = .*: leads out of the folder; give"):
        load_model(sharded)


def test_an_index_that_names_a_link_that_leads_out(sharded: Path, tmp_path: Path) -> None:
    _lead_out(sharded, "inside.safetensors")
    (sharded / "inside.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(ArgumentError, match=r"inside\.safetensors: a link that leads out of the folder, to"):
        load_model(sharded)


def test_an_index_that_names_a_folder_behind_a_link(sharded: Path, tmp_path: Path) -> None:
    _lead_out(sharded, "parts/outside.safetensors")
    (sharded / "parts").symlink_to(tmp_path)
    with pytest.raises(ArgumentError, match="a link that leads out of the folder"):
        load_model(sharded)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../outside.safetensors", "leads out of the folder"),
        ("/dev/zero.safetensors", "leads out of the folder"),
        ("other.safetensors", r"only model\.safetensors or .* is read; give the file that name"),
        (5, r"only model\.safetensors or"),
    ],
)
def test_weights_that_a_config_names(sharded: Path, name: object, reason: str) -> None:
    change_config(sharded, transformers_weights=name)
    with pytest.raises(ArgumentError, match=rf"transformers_weights = .*: {reason}"):
        load_model(sharded)


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800", "x" * 256, 5, None, ["a"]])
def test_names_that_are_none(sharded: Path, name: object) -> None:
    table = json.loads((sharded / INDEX).read_text())
    table["weight_map"]["lm_head.weight"] = name
    (sharded / INDEX).write_text(json.dumps(table))
    with pytest.raises(ArgumentError, match=r"weight_map\.lm_head\.weight = .*: not the name of a file"):
        load_model(sharded)


@pytest.mark.parametrize(
    "entry",
    [
        {"tokenizer_file": "/etc/hostname"},
        {"vocab_file": "../vocab.json"},
        {"fast_tokenizer_files": ["../../tokenizer.1.json"]},
    ],
    ids=str,
)
def test_a_tokenizer_that_names_files_outside(checkpoint: Any, tmp_path: Path, entry: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(checkpoint("gqa-tied"), tmp_path / "model"))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"special_tokens_map_file": "/scratch/map.json"}))
    load_tokenizer(folder)
    path.write_text(json.dumps(settings | entry))
    (key,) = entry
    with pytest.raises(ArgumentError, match=rf"tokenizer_config\.json: {key} = .*: leads out of the folder"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"],
)
def test_links_that_lead_out(checkpoint: Any, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(checkpoint("gqa-tied"), tmp_path / "model"))
    outside = tmp_path / f"outside-{name}"
    if (folder / name).exists():
        (folder / name).rename(outside)
    else:
        outside.write_text("{}")
    (folder / name).symlink_to(outside)
    load = load_tokenizer if name in ("tokenizer.json", "chat_template.jinja") else load_model
    with pytest.raises(ArgumentError, match=rf"{name}: a link that leads out of the folder, to .*; copy"):
        load(folder)


def test_a_link_to_nothing_and_a_circle(checkpoint: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("gqa-tied"), tmp_path / "model"))
    path = folder / "generation_config.json"
    for target, match in (("nowhere", "a link to nothing"), ("generation_config.json", "cannot be read")):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        with pytest.raises(ArgumentError, match=rf"generation_config\.json: {match}"):
            load_model(folder)


def _as_hub(source: Path, root: Path) -> Path:
    """A checkpoint as Hugging Face's cache keeps it: links from snapshots to blobs."""
    model = root / "hub" / "models--somebody--tiny"
    snapshot = model / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for at, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, model / "blobs" / f"{at:040x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{at:040x}"))
    return snapshot


def test_the_cache_of_hugging_face_works(checkpoint: Any, tmp_path: Path) -> None:
    snapshot = _as_hub(checkpoint("gqa-tied"), tmp_path)
    assert load_tokenizer(snapshot)("A")["input_ids"] == [33]
    assert len(load_model(snapshot).shape.layers) == 2
    # A link to the snapshot is the snapshot: whoever gives a folder may.
    (tmp_path / "latest").symlink_to(snapshot)
    assert len(load_model(tmp_path / "latest").shape.layers) == 2


def test_links_of_a_snapshot_stay_with_their_model(checkpoint: Any, tmp_path: Path) -> None:
    snapshot = _as_hub(checkpoint("gqa-tied"), tmp_path)
    weights = snapshot / "model.safetensors"
    other = tmp_path / "hub" / "models--somebody--other"
    other.mkdir()
    shutil.copy(weights, other / "blob")
    weights.unlink()
    weights.symlink_to(Path("..", "..", "..", "models--somebody--other", "blob"))
    with pytest.raises(ArgumentError, match="a link that leads out of the folder"):
        load_model(snapshot)
