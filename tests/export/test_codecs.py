"""Packages of codecs that only the exporting process knows: their definitions go along in the manifest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen import __version__
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.builder import assemble
from kvgen.errors import ToolchainError
from kvgen.export import kernels as export_kernels
from kvgen.export import package as export_package
from kvgen.export.package import export, is_export
from kvgen.ir import CODECS, Codec, Spec
from kvgen.ir.codec import registered
from kvgen.passes.abi import check_variant
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.runtime.engine import Engine
from kvgen.runtime.loader import load
from kvgen.runtime.manifest import NAME, Manifest, read_manifest
from tests.export.test_package import OUTSIDER, expected, inputs
from tests.support.tiny_model import TinyModel, prompts

MINE = Codec("mine", "table", 3, 3.0, levels=(-3.0, -1.5, -0.75, -0.25, 0.25, 0.75, 1.5, 3.0))


@pytest.fixture
def mine() -> Iterator[Codec]:
    with registered(MINE):
        yield MINE


def spec_of(name: str) -> Spec:
    """K in a codec of this name, rotated; V in blocks of tokens; the last tokens as they come."""
    att = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "q_dtype": "f32"}
    k = {"format": name, "transform": "hadamard"}
    v = {"format": "int8", "group": {"head": 1, "tok": 2}}
    return load_spec(
        {"name": "own", "attention": att, "cache": {"page_size": 4, "k": k, "v": v, "keep_last": 1}}
    )


def written(folder: Path, spec: Spec) -> Path:
    """A manifest without kernels."""
    text = Manifest(__version__, spec, place(spec), {}).dump()
    (folder / NAME).write_text(text)
    return folder


def test_a_manifest_brings_along_what_its_reader_may_not_know(tmp_path: Path) -> None:
    with registered(MINE):
        spec = spec_of("mine")
        written(tmp_path, spec)
    assert "mine" not in CODECS
    try:
        assert read_manifest(tmp_path).spec == spec
        assert CODECS["mine"] == MINE and read_manifest(tmp_path).spec.hash == spec.hash
        CODECS["mine"] = replace(MINE, levels=(*MINE.levels[:-1], 2.5))
        with pytest.raises(ToolchainError, match="its codec 'mine' is not the one that is registered here"):
            read_manifest(tmp_path)
        assert is_export(tmp_path), "an export of what the codec was can still be replaced"
    finally:
        CODECS.pop("mine", None)


def test_plain_formats_need_no_definition(tmp_path: Path) -> None:
    body = json.loads((written(tmp_path, spec_of("int8")) / NAME).read_text())
    assert "codecs" not in body
    body = json.loads((written(tmp_path, spec_of("lloyd3")) / NAME).read_text())
    assert [codec["name"] for codec in body["codecs"]] == ["lloyd3"]


def test_runs_where_neither_kvgen_nor_the_codec_is_known(
    mine: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appends by requests, copies, reads and batches, with the kernels of one type only."""
    spec = spec_of("mine")

    def few(library: Any) -> list[tuple[str, str]]:
        return [*((op, check_variant(op, "", spec)) for op in export_kernels.OPS), ("decode", "multi")]

    def quickly(*given: Any, **_: Any) -> Any:
        return assemble(*given, backend=CpuBackend(opt="-O1"))

    monkeypatch.setattr(export_kernels, "_variants", few)
    monkeypatch.setattr(export_package, "assemble", quickly)
    made = export(spec, tmp_path / "out", targets=["cpu-portable"], name="own_codec")
    given = inputs()
    where = {"page_table": given["table"], "kv_lens": given["lens"], "q_starts": torch.tensor([0, 6]).int()}
    given["where"] = where
    torch.save(given, tmp_path / "in.pt")
    command = [sys.executable, OUTSIDER, made.folder, made.name, "in.pt", "out.pt", "plain"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lib = load(made.folder / made.name)
    for own, want in zip(torch.load(tmp_path / "out.pt"), expected(given, lib), strict=True):
        assert torch.equal(own, want)
    engine = Engine(TinyModel(spec), lib, num_pages=16, chunk=4, max_batch=4)
    assert [len(found) for found in engine.generate(prompts(3, 9), max_new_tokens=6)] == [6, 6]
