"""kvgen export: what it prints, writes and refuses."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Kvgen

SMALL = """
name = "tiny-cache"
[attention]
q_heads = 2
kv_heads = 1
head_dim = 16
q_dtype = "f32"
[cache]
page_size = 4
layout = "page kv head tok d"
[cache.k]
format = "f32"
[cache.v]
format = "f32"
"""


def test_export(kvgen: Kvgen, kvgen_json: Kvgen, tmp_path: Path) -> None:
    spec, folder = tmp_path / "spec.toml", tmp_path / "out"
    spec.write_text(SMALL)
    found = kvgen_json("export", spec, "--to", folder, "--target", "cpu-portable")
    assert found["package"] == "tiny_cache" and found["kernels"] == {"cpu-portable": 15}
    assert (folder / "tiny_cache" / "manifest.json").exists()
    assert found["files"] == sum(path.is_file() for path in folder.rglob("*"))
    again = kvgen("export", spec, "--to", folder, "--target", "cpu-portable")
    assert again.exit_code != 0 and "--force" in again.stderr
    unknown = kvgen("export", spec, "--to", tmp_path / "b", "--target", "cpu-mmx")
    assert unknown.exit_code != 0 and "cpu-mmx" in unknown.stderr
    assert not (tmp_path / "b").exists()
