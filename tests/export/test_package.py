"""An exported package: runs alone with the same bits, is refused when altered, destroys nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.builder import build
from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError
from kvgen.export import placing
from kvgen.export.package import Package, export, package_name
from kvgen.runtime.engine import Engine
from kvgen.runtime.loader import load
from kvgen.runtime.manifest import read_manifest, sealed
from tests.export.conftest import SPEC
from tests.support.tiny_model import TinyModel, prompts

pytestmark = pytest.mark.filterwarnings("ignore::kvgen.tune.choose.UntunedWarning")

OUTSIDER = Path(__file__).with_name("outsider.py")


def inputs() -> dict[str, Any]:
    noise = torch.Generator().manual_seed(11)
    att = SPEC.attention
    return {
        "k": torch.randn(6, att.kv_heads, att.head_dim, generator=noise),
        "v": torch.randn(6, att.kv_heads, att.v_head_dim, generator=noise),
        "where": {"slots": torch.tensor([4, 5, 6, 7, 20, 21])},
        "q": torch.randn(1, att.q_heads, att.head_dim, generator=noise),
        "table": torch.tensor([[3, 5]], dtype=torch.int32),
        "lens": torch.tensor([6], dtype=torch.int32),
        "starts": torch.tensor([0, 1], dtype=torch.int32),
        "src": torch.tensor([1], dtype=torch.int32),
        "dst": torch.tensor([3], dtype=torch.int32),
    }


def expected(given: dict[str, Any], lib: Any = None) -> list[Any]:
    lib = lib or build(SPEC, "cpu-portable", tune="off")
    cache = lib.new_cache(8)
    lib.append(cache, given["k"], given["v"], **given["where"])
    lib.copy(cache, given["src"], given["dst"])
    out, lse = lib.decode(given["q"], cache, given["table"], given["lens"])
    more, lse_more = lib.prefill(given["q"], cache, given["table"], given["lens"], given["starts"])
    merged = lib.merge(torch.stack([out, more]), torch.stack([lse, lse_more]))
    return [out, lse, more, lse_more, *merged, *lib.gather(cache, given["table"], given["lens"])]


@pytest.mark.parametrize("mode", ["plain", "compile"])
def test_runs_where_kvgen_is_absent(exported: Package, tmp_path: Path, mode: str) -> None:
    given = inputs()
    torch.save(given, tmp_path / "in.pt")
    command = [sys.executable, OUTSIDER, exported.folder, exported.name, "in.pt", "out.pt", mode]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out.pt")
    for mine, want in zip(found, expected(given), strict=True):
        assert torch.equal(mine, want)


def test_loads_into_the_runtime(exported: Package) -> None:
    lib = load(exported.folder / exported.name)
    assert lib.spec == SPEC
    given, cache = inputs(), lib.new_cache(8)
    lib.append(cache, given["k"], given["v"], **given["where"])
    lib.copy(cache, given["src"], given["dst"])
    for _ in range(2):  # by names, then by addresses
        out, lse = lib.decode(given["q"], cache, given["table"], given["lens"])
        assert torch.equal(out, expected(given)[0]) and torch.equal(lse, expected(given)[1])
    with pytest.raises(ArgumentError, match=r"kv_lens\[0\] = 9"):
        lib.decode(given["q"], cache, given["table"], torch.tensor([9], dtype=torch.int32))
    live = build(SPEC, "cpu-portable", tune="off")
    assert load(live) is live


def test_the_sample_of_its_readme_runs(exported: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (exported.folder / "README.md").read_text()
    (sample,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert not re.search(r"\b(?:q|k|v|slots|page_table|kv_lens|q_starts)_[A-Z]", text + sample)
    monkeypatch.syspath_prepend(exported.folder)
    scope: dict[str, Any] = {}
    exec(compile(sample, "README.md", "exec"), scope)  # noqa: S102 - text of this project
    assert scope["out"].shape == (1, 4, 16) and scope["out"].isfinite().all()


def test_serves_batches(exported: Package) -> None:
    tokens = []
    for lib in (load(exported.folder / exported.name), build(SPEC, "cpu-portable", tune="off")):
        engine = Engine(TinyModel(SPEC), lib, num_pages=16, chunk=4, max_batch=4)
        tokens.append(engine.generate(prompts(3, 9), max_new_tokens=6))
    assert tokens[0] == tokens[1] and all(len(found) == 6 for found in tokens[0])


def test_manifest_holds_what_an_allocator_needs(exported: Package) -> None:
    found = json.loads((exported.folder / exported.name / "manifest.json").read_text())
    assert found["spec_sha256"] == SPEC.hash
    manifest = read_manifest(exported.folder / exported.name)
    assert manifest == exported.manifest and manifest.record.to_dict() == found["page_record"]
    kernels = manifest.targets["cpu-portable"]
    assert {kernel.op for kernel in kernels} == {"append", "decode", "prefill", "merge", "copy", "gather"}
    for kernel in kernels:
        source = (exported.folder / exported.name / kernel.source.path).read_text()
        assert kernel.entry in source and SPEC.hash8 in source


def copied(exported: Package, tmp_path: Path) -> Path:
    return shutil.copytree(exported.folder / exported.name, tmp_path / "copy")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(flip, "content changed"), (cut, "bytes instead of"), (Path.unlink, "No such file")],
)
def test_altered_binary_is_refused(
    exported: Package, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = copied(exported, tmp_path)
    spoil(folder / "cpu" / "cpu-portable" / "decode_single.so")
    with pytest.raises(ToolchainError, match=rf"decode_single\.so: .*{message}"):
        load(folder)


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.__setitem__(key, value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("schema", 99), "schema 99"),
        (change("spec", {}), "damaged"),
        (lambda found: found["spec"]["cache"].update(page_size=8), "sha256 differs"),
        (change("targets", {}), "holds no CPU kernels"),
        (change("targets", {"cpu-portable": [{}]}), "damaged"),
        (lambda found: found["targets"]["cpu-portable"][0]["facts"].update(arch="vax"), "vax"),
    ],
)
def test_altered_manifest_is_refused(
    exported: Package, tmp_path: Path, spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder = copied(exported, tmp_path)
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    spoil(found)
    path.write_text(json.dumps(sealed(found)))
    with pytest.raises((ToolchainError, UnsupportedError), match=message):
        load(folder)


def test_damaged_manifest_is_refused(exported: Package, tmp_path: Path) -> None:
    """A stride or an argument that changed would send a kernel to memory that is not the cache's."""
    folder = copied(exported, tmp_path)
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    found["targets"]["cpu-portable"][0]["args"].reverse()
    path.write_text(json.dumps(found))
    with pytest.raises(ToolchainError, match="not what was written"):
        load(folder)
    path.write_text("[" * 100_000)
    with pytest.raises(ToolchainError, match="no JSON"):
        load(folder)


def test_no_manifest_at_all(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"manifest\.json: No such file.*kvgen export"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ToolchainError, match="no JSON"):
        load(tmp_path)
    with pytest.raises(ArgumentError, match="source = 5"):
        load(5)  # type: ignore[arg-type]
    for name in ("\ud800", "a\0b"):
        with pytest.raises(ArgumentError, match=r"source = .*no path"):
            load(name)


def test_target_that_was_not_exported(exported: Package) -> None:
    with pytest.raises(ArgumentError, match=r"'cpu-avx2': .* holds cpu-portable"):
        load(exported.folder / exported.name, target="cpu-avx2")


def test_destroys_nothing(exported: Package, tmp_path: Path) -> None:
    mine = tmp_path / "work"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    for force in (False, True):
        with pytest.raises(ArgumentError, match="not empty, and no export"):
            export(SPEC, mine, targets=["cpu-portable"], force=force)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArgumentError, match="no folder"):
        export(SPEC, file, targets=["cpu-portable"])
    with pytest.raises(ArgumentError, match="--force"):
        export(SPEC, exported.folder, targets=["cpu-portable"])
    assert (mine / "thesis.txt").read_text() == "years"


def test_force_replaces_an_export_whole(exported: Package, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported.folder, tmp_path / "again"))
    (folder / exported.name / "_kvgen" / "stale.py").touch()
    (folder / exported.name / "__pycache__").mkdir(exist_ok=True)
    (folder / "small.egg-info").mkdir()
    export(SPEC, folder, targets=["cpu-portable"], name="other", force=True)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "other", "pyproject.toml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"]


@pytest.mark.parametrize("where", [".git/HEAD", "notes.txt", "small/extra.py"])
def test_force_keeps_what_no_export_wrote(exported: Package, tmp_path: Path, where: str) -> None:
    folder = Path(shutil.copytree(exported.folder, tmp_path / "again"))
    (folder / where).parent.mkdir(exist_ok=True)
    (folder / where).write_text("years")
    with pytest.raises(ArgumentError, match=r"which no export wrote|and no export"):
        export(SPEC, folder, targets=["cpu-portable"], force=True)
    assert (folder / where).read_text() == "years" and (folder / "small" / "manifest.json").exists()


def test_a_project_with_a_manifest_of_its_own_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "app"}')
    (tmp_path / "pyproject.toml").write_text("[project]")
    with pytest.raises(ArgumentError, match="and no export"):
        export(SPEC, tmp_path, targets=["cpu-portable"], force=True)
    assert (tmp_path / "pyproject.toml").read_text() == "[project]"


def test_failure_leaves_the_former_export(
    exported: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(exported.folder, tmp_path / "again"))
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))

    def fail_late(one: Path, two: Path) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(placing, "_exchange", fail_late)
    with pytest.raises(OSError, match="No space"):
        export(SPEC, folder, targets=["cpu-portable"], name="small", force=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"]


def test_fills_an_empty_folder_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(SPEC, ".", targets=["cpu-portable"], name="mine")
    assert Path.cwd() == tmp_path / "here" and Path("mine/manifest.json").exists()
    export(SPEC, ".", targets=["cpu-portable"], name="mine", force=True)
    assert Path.cwd() == tmp_path / "here" and Path("mine/manifest.json").exists()
    lib = load("mine")
    monkeypatch.chdir(tmp_path)
    assert lib.kernel("copy") is not None


def test_binary_altered_after_load_is_refused(exported: Package, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path)
    lib = load(folder)
    flip(folder / "cpu" / "cpu-portable" / "copy.so")
    with pytest.raises(ToolchainError, match="content changed"):
        lib.kernel("copy")


@pytest.mark.parametrize("name", ["a b", "1st", "class", "kvgen", "a-b", "torch", "json", "é", "_", "x" * 65])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match="name = "):
        export(SPEC, tmp_path / "out", targets=["cpu-portable"], name=name)
    assert not (tmp_path / "out").exists()


def test_names_from_labels() -> None:
    labels = {"llama3-8b-int8": "llama3_8b_int8", "3b": "kernels_3b", "": "kernels", "ä/ö": "kernels"}
    assert {label: package_name(label) for label in labels} == labels


def test_interpreter_has_no_files(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="nothing to export"):
        export(SPEC, tmp_path / "out", targets=["interpret"])


def test_gpu_kernels_go_along(tmp_path: Path) -> None:
    made = export(SPEC, tmp_path / "out", targets=["sm_90"], name="gpu")
    kernels = made.manifest.targets["sm_90"]
    decode = next(kernel for kernel in kernels if kernel.op == "decode")
    assert decode.entry.split("+")[-1] == "merge_splits" and len(decode.binaries) == 2
    assert decode.schedule.int("num_warps") >= 1
    for kernel in kernels:
        for binary in kernel.binaries:
            path = binary.verify(tmp_path / "out" / "gpu")
            assert path.read_bytes()[:4] == b"\x7fELF"
        assert "@triton.jit" in (tmp_path / "out" / "gpu" / kernel.source.path).read_text()
    with pytest.raises(ToolchainError, match="holds no CPU kernels"):
        load(tmp_path / "out" / "gpu")
