"""Compiling without a GPU: outcomes, the pool, the store."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgen.backends.triton.arch import ARCH_NAMES
from kvgen.backends.triton.compile import CompileResult, Outcome, compile_many, compile_one
from kvgen.backends.triton.process import toolchain_id
from kvgen.backends.triton.source import TritonSource
from kvgen.backends.triton.store import CompiledKernel
from kvgen.errors import ToolchainError, UnsupportedError

Trivial = Callable[[str], TritonSource]


@pytest.mark.parametrize("target", ARCH_NAMES)
def test_every_target_compiles(
    paged: TritonSource, target: str, compiled: Callable[[TritonSource, str], CompiledKernel]
) -> None:
    kernel = compiled(paged, target)
    assert kernel.binary[:4] == b"\x7fELF"
    assert "paged" in kernel.assembly
    assert kernel.metadata.name == "paged"
    assert kernel.metadata.num_warps == 4
    assert kernel.metadata.warp_size == (64 if target == "gfx942" else 32)
    assert kernel.metadata.shared > 0
    assert kernel.toolchain == toolchain_id(sys.executable)
    assert kernel.signature == paged.launch_arguments


def test_outcomes_and_a_pool_that_goes_on(trivial: Trivial, tmp_path: Path) -> None:
    sources = [
        trivial("import time\ntime.sleep(60)"),
        trivial("import os\nprint('last words', flush=True)\nos.abort()"),
        trivial("def broken(:"),
        dataclasses.replace(trivial(""), kernel="missing"),
        dataclasses.replace(trivial(""), signature={"q": "*fp32"}),
        trivial("# fine"),
        trivial("# fine"),
        trivial("# fine too"),
    ]
    seen: list[tuple[int, int, CompileResult]] = []
    started = time.monotonic()
    results = compile_many(
        sources, "sm_90", cache_dir=tmp_path, workers=2, timeout_s=8.0, progress=lambda *a: seen.append(a)
    )
    assert time.monotonic() - started < 60
    assert [r.outcome for r in results] == [
        Outcome.TIMEOUT, Outcome.CRASH, Outcome.COMPILE_ERROR, Outcome.COMPILE_ERROR, Outcome.COMPILE_ERROR,
        Outcome.OK, Outcome.OK, Outcome.OK,
    ]  # fmt: skip
    timeout, crash, syntax, missing, mismatch, *fine = (r.message for r in results)
    assert timeout == "no result after 8 s"
    assert "SIGABRT" in crash
    assert "last words" in crash
    assert "SyntaxError" in syntax
    assert "broken" in syntax
    assert "missing is not a @triton.jit function" in missing
    assert "does not match the parameters" in mismatch
    assert fine == ["", "", ""]
    assert all((r.kernel is None) == (r.outcome is not Outcome.OK) for r in results)
    assert [done for done, _, _ in seen] == list(range(1, 9))
    assert results[5].kernel == results[6].kernel  # one compile for equal sources
    assert not list(tmp_path.glob("compiling-*"))  # nothing of Triton's own is left

    again = compile_many(sources[5:], "sm_90", cache_dir=tmp_path)
    assert all(r.cached and r.seconds == 0 for r in again)


def test_compilers_message_reaches_the_caller(tmp_path: Path, trivial: Trivial) -> None:
    text = trivial("").text.replace("pass", "tl.store(p, tl.load(p) @ 3)")
    with pytest.raises(ToolchainError, match=r"(?s)nothing for sm_80: compile_error: .*tl\.store\(p"):
        compile_one(dataclasses.replace(trivial(""), text=text), "sm_80", cache_dir=tmp_path)


def test_too_much_shared_memory_is_a_resource_outcome(paged: TritonSource, tmp_path: Path) -> None:
    wide = dataclasses.replace(paged, constants={**paged.constants, "TILE": 256}, num_stages=3)
    (result,) = compile_many([wide], "sm_89", cache_dir=tmp_path)
    assert result.outcome is Outcome.RESOURCE
    assert "101376" in result.message
    (cached,) = compile_many([wide], "sm_89", cache_dir=tmp_path)
    assert cached.outcome is Outcome.RESOURCE
    assert cached.seconds == 0


def test_too_few_registers_is_a_resource_outcome(paged: TritonSource, tmp_path: Path) -> None:
    (result,) = compile_many([dataclasses.replace(paged, maxnreg=16)], "sm_80", cache_dir=tmp_path)
    assert result.outcome is Outcome.RESOURCE
    assert "Insufficient registers" in result.message


@pytest.mark.parametrize("suffix", ["cubin", "ptx", "json"])
def test_truncated_entry_is_set_aside_and_compiled_anew(
    trivial: Trivial, tmp_path: Path, suffix: str
) -> None:
    source = trivial("")
    before = compile_one(source, "sm_80", cache_dir=tmp_path)
    binary = before.binary
    victim = before.binary_path.with_suffix(f".{suffix}")
    victim.write_bytes(victim.read_bytes()[:40])
    (result,) = compile_many([source], "sm_80", cache_dir=tmp_path)
    assert not result.cached
    assert result.kernel is not None
    assert result.kernel.binary == binary  # and Triton is deterministic
    assert victim.with_name(victim.name + ".bad").stat().st_size == 40
    assert compile_many([source], "sm_80", cache_dir=tmp_path)[0].cached


def test_foreign_entry_is_set_aside(trivial: Trivial, tmp_path: Path) -> None:
    mine = compile_one(trivial("# mine"), "sm_80", cache_dir=tmp_path)
    other = compile_one(trivial("# other"), "sm_80", cache_dir=tmp_path)
    mine.binary_path.with_suffix(".json").write_bytes(other.binary_path.with_suffix(".json").read_bytes())
    assert not compile_many([trivial("# mine")], "sm_80", cache_dir=tmp_path)[0].cached


def test_binary_does_not_depend_on_the_folder(trivial: Trivial, tmp_path: Path) -> None:
    a, b = (compile_one(trivial(""), "sm_90", cache_dir=tmp_path / name) for name in "ab")
    assert a.binary == b.binary


def test_environment_cannot_change_the_code(
    trivial: Trivial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    compile_one(trivial(""), "sm_80", cache_dir=tmp_path / "cache")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache"]


def test_interpreter_without_triton_is_named(tmp_path: Path, trivial: Trivial) -> None:
    with pytest.raises(ToolchainError, match="cannot run"):
        compile_one(trivial(""), "sm_80", cache_dir=tmp_path, python=str(tmp_path / "no-python"))
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'PackageNotFoundError: triton' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(ToolchainError, match=f"{fake} has no usable triton: PackageNotFoundError"):
        compile_one(trivial(""), "sm_80", cache_dir=tmp_path, python=str(fake))


def test_worker_that_cannot_start_is_an_error_not_an_outcome(tmp_path: Path, trivial: Trivial) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$2" = -c ] && echo 3.9.0 && exit 0\necho no such module >&2\nexit 7\n')
    fake.chmod(0o755)
    with pytest.raises(ToolchainError, match=r"(?s)could not start: exit status 7.*no such module"):
        compile_one(trivial(""), "sm_80", cache_dir=tmp_path, python=str(fake))


def test_register_limit_is_refused_for_amd(spilling: TritonSource, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="maxnreg = 32"):
        compile_many([spilling], "gfx942", cache_dir=tmp_path)


def test_worker_ends_with_its_parent(tmp_path: Path, repo_root: Path) -> None:
    script = f"""
import sys, pathlib
sys.path.append({str(repo_root)!r})
from kvgen.backends.triton.process import WorkerProcess
worker = WorkerProcess("compile", python=sys.executable, folder=pathlib.Path({str(tmp_path)!r}), env={{}})
worker.wait_ready()
worker.send({{"path": {str(tmp_path / "hang.py")!r}}})
print(worker.pid, flush=True)
sys.stdin.read()
"""
    (tmp_path / "hang.py").write_text("import time\ntime.sleep(60)\n")
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 20
    while _runs(worker):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_triton_36_compiles_through_its_own_interpreter(
    paged: TritonSource, triton36: str, kernel_dir: Path
) -> None:
    assert toolchain_id(triton36).startswith("triton-3.6")
    for target in ("sm_80", "sm_90", "gfx942"):
        kernel = compile_one(paged, target, cache_dir=kernel_dir, python=triton36)
        assert kernel.toolchain == toolchain_id(triton36)
        assert kernel.metadata.shared > 0


def test_importing_the_tool_chain_loads_neither_triton_nor_torch(repo_root: Path) -> None:
    names = ["compile", "inspection", "interpret", "source", "store"]
    script = "import sys\n" + "".join(f"import kvgen.backends.triton.{name}\n" for name in names)
    script += "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0
