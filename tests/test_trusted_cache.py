"""Nothing is loaded from a cache that others could have written to: one warning, and a folder of its own."""

from __future__ import annotations

import base64
import os
import stat
import subprocess
import sys
import warnings
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from kvgen import paths, trust
from kvgen.backends.cpu import artifact, loader, toolchain
from kvgen.backends.triton import files, store
from kvgen.backends.triton.arch import gpu_arch
from kvgen.commands import machine
from kvgen.errors import ToolchainError
from kvgen.tune.journal import Journal

OURS = 'extern "C" int answer(const void*) { return 42; }'
THEIRS = 'extern "C" int answer(const void*) { return 666; }'
META = {"name": "k", "shared": 0, "num_warps": 4, "num_stages": 1, "num_ctas": 1, "warp_size": 32}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning given, no temporary folder made, nobody vouched for anything yet."""
    monkeypatch.setattr(paths, "_warned", set())
    monkeypatch.setattr(paths, "_temporary", None)
    monkeypatch.delenv("KVGEN_TRUST", raising=False)


def answer(library: Path) -> int:
    return loader.load(library).function("answer", []).raw(b"")


@pytest.fixture
def planted(own_cache_dir: Path) -> Path:
    """A cache whose build of ``OURS`` was replaced, with a sidecar that vouches for it."""
    library = toolchain.compile_shared(OURS)
    other = toolchain.compile_shared(THEIRS)
    sidecar = artifact.read_sidecar(library)
    data = other.read_bytes()
    library.write_bytes(data)
    forged = {**sidecar.__dict__, "size": len(data), "sha256": artifact.digest(data)}
    library.with_suffix(".json").write_text(artifact.Sidecar(**forged).dump())
    assert artifact.verify(library), "whoever may write here may run what they like"
    return library


def opened(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


@pytest.mark.parametrize("where", ["root", "build"])
def test_a_cache_that_all_may_write_to_is_not_loaded(
    own_cache_dir: Path, planted: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(own_cache_dir if where == "root" else own_cache_dir / "build")
    with pytest.warns(paths.CacheWarning) as caught:
        library, again = [toolchain.compile_shared(OURS) for _ in range(2)]
    assert library == again
    said = str(caught[0].message)
    assert len(caught) == 1 and "everybody may write to" in said and "KVGEN_TRUST=" in said
    assert answer(library) == 42 and not library.is_relative_to(own_cache_dir)
    with pytest.raises(ToolchainError, match="not loaded, because everybody may write to"):
        loader.load(planted)
    monkeypatch.setenv("KVGEN_TRUST", str(own_cache_dir))
    assert toolchain.compile_shared(OURS) == planted and answer(planted) == 666


def test_a_cache_of_a_stranger_is_not_loaded(
    own_cache_dir: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(trust, "_owners", lambda: (0, me + 1) if me else (54321,))
    with pytest.warns(paths.CacheWarning, match=r"belongs to .* neither to you nor to root"):
        assert not paths.readable("build").is_relative_to(own_cache_dir)  # type: ignore[union-attr]
    with pytest.raises(ToolchainError, match="belongs to"):
        artifact.verify(planted)


@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_an_entry_that_all_may_write_to_is_built_anew(
    own_cache_dir: Path, planted: Path, suffix: str
) -> None:
    opened(planted.with_suffix(suffix))
    with pytest.warns(paths.CacheWarning, match="everybody may write to .*set aside as"):
        assert toolchain.compile_shared(OURS) == planted
    assert answer(planted) == 42


def test_new_folders_are_of_their_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any umask nobody else may write to what is made, so that it is fit to be loaded next time."""
    root = tmp_path / "above" / "cache"
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(root))
    before = os.umask(0)
    try:
        library = toolchain.compile_shared(OURS)
        record = paths.subfolder("tune") / "x.json"
        paths.write_atomic(record, "{}")
        journal = Journal(record.with_name("x.jsonl"), {"op": "decode"})
        journal.add("trial", {"n": 1}, outcome="ok", message="")
        reply = {"binary": base64.b64encode(b"cubin").decode(), "assembly": "ptx", "metadata": META}
        arch = gpu_arch("sm_90")
        folder = paths.subfolder("triton")
        store.save(folder, "abcd", arch, toolchain="t", signature=(), reply=reply, seconds=1.0)
    finally:
        os.umask(before)
    for folder in (root.parent, root):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert trust.fault(root, below=True) == "" and trust.fault(library) == ""
    assert [path for path in root.rglob("*") if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("suffix", [".json", ".cubin", ".ptx"])
def test_a_gpu_kernel_that_all_may_write_to_is_compiled_anew(tmp_path: Path, suffix: str) -> None:
    arch = gpu_arch("sm_90")
    reply = {"binary": base64.b64encode(b"cubin").decode(), "assembly": "ptx", "metadata": META}
    store.save(tmp_path, "abcd", arch, toolchain="t", signature=(), reply=reply, seconds=1.0)
    assert store.load(tmp_path, "abcd", arch) is not None
    opened(tmp_path / "kernels" / "ab" / f"abcd{suffix}")
    with pytest.warns(paths.CacheWarning, match=f"abcd{suffix} .*compiled anew"):
        assert store.load(tmp_path, "abcd", arch) is None
    assert (tmp_path / "kernels" / "ab" / "abcd.json.bad").exists()


def test_a_gpu_kernel_is_measured_before_it_is_read(tmp_path: Path) -> None:
    arch = gpu_arch("sm_90")
    reply = {"binary": base64.b64encode(b"cubin").decode(), "assembly": "ptx", "metadata": META}
    kernel = store.save(tmp_path, "abcd", arch, toolchain="t", signature=(), reply=reply, seconds=1.0)
    kernel.binary_path.unlink()
    os.mkfifo(kernel.binary_path)
    assert store.load(tmp_path, "abcd", arch) is None
    store.save(tmp_path, "abcd", arch, toolchain="t", signature=(), reply=reply, seconds=1.0)
    (tmp_path / "kernels" / "ab" / "abcd.json").write_text("[" * 100_000)
    assert store.load(tmp_path, "abcd", arch) is None


def test_rendered_modules_of_others_are_not_imported(tmp_path: Path) -> None:
    path = files.write_module("x = 1\n", tmp_path)
    cached = Path(cache_from_source(str(path)))
    cached.parent.mkdir()
    cached.write_bytes(b"what an import would run")
    opened(path), opened(cached)
    assert files.write_module("x = 1\n", tmp_path) == path
    assert trust.fault(path) == "" and not cached.exists()


def test_a_log_of_trials_that_all_may_write_to_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    Journal(path, {"op": "decode"}).add("trial", {"n": 1}, outcome="ok", message="")
    assert Journal(path, {"op": "decode"}).known("trial", {"n": 1})
    opened(path)
    with pytest.warns(paths.CacheWarning, match="everybody may write"):
        assert Journal(path, {"op": "decode"}).known("trial", {"n": 1}) is None
    os.mkfifo(path)
    with pytest.warns(paths.CacheWarning, match="a pipe"):
        Journal(path, {"op": "decode"})


def test_the_doctor_says_why_a_cache_is_not_used(own_cache_dir: Path) -> None:
    opened(own_cache_dir)
    found = next(iter(machine.folders()))
    assert "not used (everybody may write to" in found.value and "KVGEN_TRUST" in found.hint


def test_where_no_folder_is_fit_the_temporary_one_serves_this_process_and_its_children(
    own_cache_dir: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    """In some containers the root folder itself belongs to another."""
    real = trust._of

    def odd(status: os.stat_result, path: str, *, last: bool) -> str:
        return "/ belongs to uid 65534" if path == "/" else real(status, path, last=last)

    monkeypatch.setattr(trust, "_of", odd)
    with pytest.warns(paths.CacheWarning, match="belongs to uid 65534"):
        library = toolchain.compile_shared(OURS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toolchain.compile_shared(OURS) == library and answer(library) == 42
    code = (
        "import sys; from kvgen import trust; trust._of = lambda *a, **b: 'odd'\n"
        f"print(trust.fault({str(library)!r}) or 'fit', trust.fault('/etc'))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["fit", "odd"], done.stderr
