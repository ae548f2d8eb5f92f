"""Folders: whole checkpoints load, and each way of being incomplete is one clear error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError
from kvgen.models import extras
from kvgen.models.checkpoint import load_model, load_tokenizer, stop_tokens
from kvgen.models.extras import installed

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")


@pytest.fixture
def copy(checkpoint, tmp_path: Path) -> Path:
    """A checkpoint that the test may spoil."""
    return Path(shutil.copytree(checkpoint("gqa-tied"), tmp_path / "copy"))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_are_computed_with_in_f32(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = copy / "model.safetensors"
    stored = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(stored, path, metadata={"format": "pt"})
    model = load_model(copy)
    assert {tensor.dtype for tensor in model.module.parameters()} == {torch.float32}
    assert not model.module.training


def test_weights_in_several_files(checkpoint, tmp_path: Path) -> None:
    whole = load_model(checkpoint("gqa-tied")).module
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    parts = load_model(tmp_path).module.state_dict()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.state_dict().items())
    shards[0].unlink()
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_model(tmp_path)


def test_weights_that_are_missing_are_not_made_up(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = copy / "model.safetensors"
    stored = load_file(path)
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=r"1 weights are missing, first model\.layers\.1\.mlp\.up_proj"):
        load_model(copy)


def test_weights_of_another_shape(copy: Path) -> None:
    change_config(copy, intermediate_size=100)
    with pytest.raises(ArgumentError, match=str(copy)):
        load_model(copy)


def test_weights_that_are_no_safetensors(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_model(copy)


def test_weights_of_other_kinds_are_not_read(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"no \*\.safetensors"):
        load_model(copy)


def test_a_config_that_transformers_refuses(copy: Path) -> None:
    change_config(copy, hidden_size=62)
    with pytest.raises(ArgumentError, match=r"config\.json: .*hidden size \(62\)"):
        load_model(copy)


def test_code_in_the_folder_does_not_run(copy: Path) -> None:
    (copy / "modeling.py").write_text("raise SystemExit('ran')")
    change_config(copy, auto_map={"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Config"})
    load_model(copy)


def test_other_architectures(copy: Path) -> None:
    change_config(copy, model_type="gpt2")
    with pytest.raises(UnsupportedError, match='model_type = "gpt2"'):
        load_model(copy)


def test_the_tokenizer(copy: Path) -> None:
    tokenizer = load_tokenizer(copy)
    ids = tokenizer("A b!")["input_ids"]
    assert ids == [33, 0, 66, 1] and tokenizer.decode(ids) == "A b!"
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ArgumentError, match="tokenizer cannot be read"):
        load_tokenizer(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ArgumentError, match="--ids"):
        load_tokenizer(copy)


@pytest.mark.parametrize(("eos", "want"), [(None, ()), (7, (7,)), ([7, 8], (7, 8))])
def test_tokens_that_end_a_text(copy: Path, eos: object, want: tuple[int, ...]) -> None:
    change_config(copy, eos_token_id=eos)
    (copy / "generation_config.json").unlink(missing_ok=True)
    assert stop_tokens(load_model(copy)) == want


def test_a_missing_extra(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "installed", lambda package: package != "transformers")
    with pytest.raises(
        ToolchainError, match=r"transformers not installed here; try: pip install 'kvgen\[mod"
    ):
        load_model(copy)
