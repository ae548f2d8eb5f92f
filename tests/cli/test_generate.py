"""``kvgen generate``: sources and a manifest; foreign files are safe."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvgen
from kvgen.commands.options import assembled, read_spec
from kvgen.ir.plan import OPS

INT8, BF16 = "examples/llama3-8b-int8.toml", "examples/llama3-8b-bf16.toml"


@pytest.mark.parametrize(("target", "suffix"), [("cpu-avx512", "cpp"), ("sm_90", "py"), ("gfx942", "py")])
def test_sources_and_manifest(kvgen_json: Any, tmp_path: Path, target: str, suffix: str) -> None:
    data = kvgen_json("generate", INT8, "--target", target, "--to", tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert data["manifest"] == manifest
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*(f"{op}.{suffix}" for op in OPS), "manifest.json"]
    )
    assert kvgen.load_spec(manifest["spec"]).hash == manifest["hash"]
    library = assembled(read_spec(INT8), target)
    for kernel in manifest["kernels"]:
        text = (tmp_path / "out" / kernel["file"]).read_text()
        assert text == library.source(kernel["op"])
        assert hashlib.sha256(text.encode()).hexdigest() == kernel["sha256"]
        assert kernel["schedule"] == library.schedules[kernel["op"]].to_dict()
        assert kernel["args"]
        names = [kernel["entry"]] if suffix == "cpp" else [launch["name"] for launch in kernel["launches"]]
        assert all(name in text for name in names)


def test_the_flags_of_the_manifest_build(kvgen_json: Any, tmp_path: Path) -> None:
    from kvgen.backends.cpu.compiler import find_compiler

    kernels = kvgen_json("generate", INT8, "--op", "copy", "--target", "cpu-portable", "--to", tmp_path)
    (kernel,) = kernels["manifest"]["kernels"]
    command = [*find_compiler().command, *kernel["flags"], "-shared", kernel["file"], "-o", "copy.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert kernel["entry"].encode() in (tmp_path / "copy.so").read_bytes()


def test_variants(kvgen_json: Any, tmp_path: Path) -> None:
    kvgen_json("generate", INT8, "--op", "decode", "--op", "gather", "--all-variants", "--to", tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.cpp")) == [
        "decode.cpp", "decode_multi.cpp", "gather.cpp", "gather_f16.cpp", "gather_f32.cpp",
    ]  # fmt: skip


def test_a_second_op_joins_the_folder(kvgen_json: Any, tmp_path: Path) -> None:
    kvgen_json("generate", INT8, "--op", "decode", "--to", tmp_path)
    kvgen_json("generate", INT8, "--op", "append", "--to", tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [kernel["file"] for kernel in manifest["kernels"]] == ["append.cpp", "decode.cpp"]


def test_own_files_are_replaced(kvgen: Any, tmp_path: Path) -> None:
    assert kvgen("generate", INT8, "--op", "decode", "--to", tmp_path).exit_code == 0
    assert kvgen("generate", BF16, "--op", "decode", "--to", tmp_path).exit_code == 0
    assert "dd71d05d" in (tmp_path / "decode.cpp").read_text()


def test_foreign_files_are_safe(kvgen: Any, tmp_path: Path) -> None:
    mine = tmp_path / "decode.cpp"
    mine.write_text("// mine\n")
    (tmp_path / "notes.txt").write_text("keep")
    result = kvgen("generate", INT8, "--to", tmp_path)
    assert result.exit_code == 2 and "decode.cpp" in result.stderr and "--force" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.cpp", "notes.txt"]
    assert mine.read_text() == "// mine\n"
    assert kvgen("generate", INT8, "--to", tmp_path, "--force").exit_code == 0
    assert "kvgen decode" in mine.read_text() and (tmp_path / "notes.txt").read_text() == "keep"


def test_edited_files_are_safe(kvgen: Any, tmp_path: Path) -> None:
    kvgen("generate", INT8, "--op", "copy", "--to", tmp_path)
    with (tmp_path / "copy.cpp").open("a") as file:
        file.write("// my change\n")
    result = kvgen("generate", INT8, "--op", "copy", "--to", tmp_path)
    assert result.exit_code == 2 and "edited" in result.stderr
    assert (tmp_path / "copy.cpp").read_text().endswith("// my change\n")


def test_a_foreign_manifest_is_safe(kvgen: Any, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    assert kvgen("generate", INT8, "--to", tmp_path).exit_code == 2
    assert (tmp_path / "manifest.json").read_text() == '{"name": "a web app"}'


def test_specs_are_not_mixed(kvgen: Any, tmp_path: Path) -> None:
    kvgen("generate", INT8, "--to", tmp_path)
    result = kvgen("generate", BF16, "--op", "decode", "--to", tmp_path)
    assert result.exit_code == 2 and "of llama3-8b-int8 (24a5bc15)" in result.stderr
    assert kvgen("generate", BF16, "--to", tmp_path).exit_code == 0


def test_a_file_in_the_folders_place(kvgen: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    result = kvgen("generate", INT8, "--to", tmp_path / "out")
    assert result.exit_code == 2 and "File exists" in result.stderr and "Traceback" not in result.output
