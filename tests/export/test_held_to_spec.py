"""A manifest that somebody sealed again: held against itself, its folder and its kernels."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import KvgenError, ToolchainError
from kvgen.export.package import Package, is_export
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.runtime.loader import load
from kvgen.runtime.manifest import NAME, read_body, read_manifest, sealed
from tests.export.conftest import SPEC
from tests.support.specs import make_spec

Body = dict[str, Any]
Edit = Callable[[Body, Path], Any]


@pytest.fixture
def folder(exported: Package, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported.folder / exported.name, tmp_path / "copy"))


def resealed(folder: Path, edit: Edit) -> Path:
    body = read_body(folder)
    edit(body, folder)
    (folder / NAME).write_text(json.dumps(sealed(body)))
    return folder


def kernels(body: Body) -> list[Body]:
    found: list[Body] = body["targets"]["cpu-portable"]
    return found


def other_spec(body: Body, spec: Spec, *, record: bool) -> None:
    body.update(spec=spec.to_dict(), spec_sha256=spec.hash)
    if record:
        body["page_record"] = place(spec).to_dict()


LARGER = make_spec("int8-token", "f32", page_size=64, kv_heads=2, group=2, head_dim=16)


def without_features(body: Body) -> None:
    other_spec(body, LARGER, record=True)
    for kernel in kernels(body):
        del kernel["features"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda body, _: other_spec(body, LARGER, record=False), "page record is not its spec's .*64"),
        (lambda body, _: other_spec(body, LARGER, record=True), "compiled for another spec"),
        (lambda body, _: without_features(body), "compiled for another spec"),
        (
            lambda body, _: body["page_record"].update(place(make_spec("int8-token", "f32")).to_dict()),
            "page record is not its spec's",
        ),
        (
            lambda body, _: body["page_record"]["planes"][0]["axes"][2]["stride"].update(fixed=8),
            "page record is not its spec's .*plane k",
        ),
        (lambda body, _: body["page_record"]["planes"][1].update(dtype="f16"), "k_scale: holds f16"),
        (lambda body, _: body["page_record"]["pools"]["kv"].update(per_page=64), "past its pool"),
        (lambda body, _: kernels(body)[0].update(schedule={"made": "up"}), "compiled for another spec"),
        (lambda body, _: kernels(body)[0].update(facts={}), r"damaged: facts of .* is not a sidecar: \{\}"),
        (lambda body, _: kernels(body)[0]["facts"].update(requires="avx2"), "requires = 'avx2'"),
        (lambda body, _: kernels(body)[0]["facts"].update(size=True), "size = True"),
        (lambda body, _: kernels(body)[0].update(binaries=[]), "binaries of .* are not those of its facts"),
    ],
)
def test_what_does_not_fit_together_is_refused(folder: Path, edit: Edit, message: str) -> None:
    with pytest.raises(ToolchainError, match=message) as caught:
        load(resealed(folder, edit))
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 600


def test_raw_rows_are_held_to_the_spec_too(tmp_path: Path) -> None:
    att = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "q_dtype": "f32"}
    v = {"format": "int8", "group": {"head": 1, "tok": 2}}
    cache = {"page_size": 4, "k": {"format": "int8"}, "v": v, "keep_last": 1}
    spec = load_spec({"name": "raw", "attention": att, "cache": cache})
    body = {"schema": 2, "kvgen": "0", "spec": spec.to_dict(), "spec_sha256": spec.hash, "targets": {}}
    body["page_record"] = place(spec).to_dict()
    (tmp_path / NAME).write_text(json.dumps(sealed(body)))
    assert read_manifest(tmp_path).record == place(spec)
    for change in ({"offset": {"fixed": 0, "per_page": 0}}, {"dtype": "bf16"}, {"pool": "kv"}):
        damaged = json.loads(json.dumps(body))
        damaged["page_record"]["raw"][1] |= change
        (tmp_path / NAME).write_text(json.dumps(sealed(damaged)))
        with pytest.raises(ToolchainError, match="page record is not its spec's"):
            read_manifest(tmp_path)


def linked(body: Body, folder: Path) -> None:
    """A path inside the folder that a link leads out of it."""
    (folder / "out").symlink_to(folder.parent)
    (folder.parent / "x.so").write_bytes(b"")
    kernels(body)[0]["binaries"][0]["path"] = "out/x.so"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda body, _: kernels(body)[0]["binaries"][0].update(path="../../x"), "leads out of the folder"),
        (
            lambda body, _: kernels(body)[0]["binaries"][0].update(path="/etc/passwd"),
            "leads out of the folder",
        ),
        (lambda body, _: kernels(body)[0]["binaries"][0].update(path=7), "7 is no path"),
        (linked, "leads out of the folder by a link"),
    ],
)
def test_paths_stay_in_the_folder(folder: Path, edit: Edit, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        load(resealed(folder, edit))


def test_a_source_path_stays_in_the_folder_too(folder: Path) -> None:
    resealed(folder, lambda body, _: kernels(body)[0]["source"].update(path="../../../../../etc/passwd"))
    lib = load(folder)
    with pytest.raises(ToolchainError, match="leads out of the folder"):
        lib.source(kernels(read_body(folder))[0]["op"])  # type: ignore[attr-defined]


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def holes(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("cpu/cpu-portable/copy.so", pipe, "no regular file but a pipe"),
        ("cpu/cpu-portable/copy.so", device, "leads out of the folder by a link"),
        ("cpu/cpu-portable/copy.so", holes, "1099511627776 bytes instead of"),
        (NAME, pipe, "no regular file but a pipe"),
        (NAME, device, "not loaded, because everybody may write to /dev/zero"),
        (NAME, holes, "1,099,511,627,776 bytes, and at most"),
    ],
)
def test_what_is_no_file_or_too_large_is_not_read(
    folder: Path, name: str, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder / name)
    with pytest.raises(ToolchainError, match=message):
        load(folder)
    assert name != NAME or not is_export(folder)


@pytest.mark.parametrize("name", [".", NAME, "cpu/cpu-portable", "cpu/cpu-portable/copy.so"])
def test_an_export_that_others_may_write_to_is_not_loaded(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / name).chmod(0o777)
    with pytest.raises(ToolchainError, match=r"not loaded, because everybody may write to .*KVGEN_TRUST="):
        load(folder)
    monkeypatch.setenv("KVGEN_TRUST", str(folder.parent))
    assert load(folder).spec == SPEC
    monkeypatch.delenv("KVGEN_TRUST")
    assert is_export(folder), "it can still be replaced"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of a list its first item only."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def test_any_other_value_anywhere_is_one_line(folder: Path) -> None:
    text = (folder / NAME).read_text()
    found = [path for path in places(json.loads(text)) if path and path != ("sha256",)]
    assert len(found) > 80
    others = [None, {}, [], -1, 2**70, "x", 0.5, {"a": [None]}, True]
    for number, path in enumerate(found):
        for value in (others[number % len(others)], others[(number * 5 + 3) % len(others)]):
            body = json.loads(text)
            at = body
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            with contextlib.suppress(Exception):  # as somebody would who seals it again
                body["spec_sha256"] = Spec.from_dict(body["spec"]).hash
            (folder / NAME).write_text(json.dumps(sealed(body)))
            is_export(folder)
            try:
                load(folder)
            except KvgenError as error:
                said = str(error)
                assert len(said.splitlines()) == 1 and len(said) < 1000, (path, value, said)
