"""Builds: content addressing, atomicity, damage, numbers, errors that can be acted on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvgen import paths
from kvgen.backends.cpu import artifact, isa, toolchain
from kvgen.backends.cpu.batch import Outcome, compile_many
from kvgen.backends.cpu.compiler import Compiler, find_compiler
from kvgen.backends.cpu.job import Job
from kvgen.backends.cpu.loader import load
from kvgen.backends.cpu.process import CompilerTimeout
from kvgen.errors import ArgumentError, ToolchainError

ANSWER = 'extern "C" int answer(const void*) { return %d; }\n'
ENDLESS = "// ENDLESS\n" + ANSWER % 0
SLOW = "if grep -qs ENDLESS *.cpp; then sleep 60; fi"  # a compiler that hangs on that source, and only on it


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "build"


def run(path: Path, name: str = "answer") -> int:
    return load(path).function(name, []).raw(b"")


def counting(tmp_path: Path, before: str = "") -> tuple[Compiler, Path]:
    """The real compiler behind a script that logs each compile step."""
    real = find_compiler()
    log, wrapper = tmp_path / "calls", tmp_path / "cxx"
    log.write_text("")
    wrapper.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo x >> {log};; esac\n'
        f'{before}\nexec {" ".join(real.command)} "$@"\n'
    )
    wrapper.chmod(0o755)
    return Compiler((str(wrapper),), real.kind, real.version, real.triple), log


def test_a_build_is_made_once_and_holds_all_its_parts(store: Path, tmp_path: Path) -> None:
    cxx, log = counting(tmp_path)
    first = toolchain.compile_shared(ANSWER % 42, name="reply", cache_dir=store, compiler=cxx)
    again = toolchain.compile_shared([ANSWER % 42], name="reply", cache_dir=store, compiler=cxx)
    assert first == again
    assert log.read_text() == "x\n"
    assert run(first) == 42
    assert sorted(p.name for p in first.parent.iterdir()) == ["reply.cpp", "reply.json", "reply.so"]
    assert first.with_suffix(".cpp").read_text() == ANSWER % 42
    sidecar = artifact.read_sidecar(first)
    assert first.parent.name == f"reply-{sidecar.key[:16]}"
    assert sidecar.size == first.stat().st_size
    assert sidecar.arch == isa.machine()
    assert [p.name for p in store.iterdir()] == [first.parent.name]  # no temporary folder is left


def test_the_key_holds_what_changes_the_binary_and_nothing_else() -> None:
    cxx = find_compiler()
    base = Job(("int x;",))
    different = [
        Job(("int y;",)),
        Job(("int x;", "int y;")),
        Job(("int x;",), flags=("-DA",)),
        Job(("int x;",), opt="-O2"),
        Job(("int x;",), fp_contract="off"),
        Job(("int x;",), sanitize=True),
        Job(("int x;",), name="other"),
    ]
    keys = {job.key(cxx) for job in [base, *different]}
    assert len(keys) == len(different) + 1
    assert Job(("int x;",), timeout_s=1).key(cxx) == base.key(cxx)
    assert base.key(Compiler(("/elsewhere/g++",), cxx.kind, cxx.version, cxx.triple)) == base.key(cxx)
    assert base.key(Compiler(cxx.command, cxx.kind, cxx.version + "1", cxx.triple)) != base.key(cxx)


def test_the_binary_does_not_depend_on_where_the_cache_lies(tmp_path: Path) -> None:
    # assert() puts __FILE__ into the binary
    source = '#include <cassert>\nextern "C" int answer(const void* p) { assert(p); return 1; }\n'
    a, b = (toolchain.compile_shared(source, cache_dir=tmp_path / name) for name in ("a", "longer/b"))
    assert a.read_bytes() == b.read_bytes()


def test_several_sources_are_linked_together(store: Path) -> None:
    sources = [
        "int part(); " + 'extern "C" int answer(const void*) { return part(); }',
        "int part() { return 7; }",
    ]
    path = toolchain.compile_shared(sources, cache_dir=store)
    assert run(path) == 7
    assert (path.parent / "kernel_1.cpp").read_text() == sources[1]


def test_libraries_do_not_see_each_others_helpers(store: Path) -> None:
    text = "int helper() { return %d; }\ninline int shared() { static int n = 0; return ++n; }\n"
    text += 'extern "C" int answer(const void*) { return 10 * helper() + shared(); }\n'
    one, two = (toolchain.compile_shared(text % n, cache_dir=store) for n in (1, 2))
    assert [run(one), run(two), run(two)] == [11, 21, 22]


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "foreign", "no sidecar", "half a sidecar", "old schema", "a file"]
)
def test_a_damaged_entry_is_set_aside_and_rebuilt(store: Path, damage: str) -> None:
    path = toolchain.compile_shared(ANSWER % 5, cache_dir=store)
    whole, sidecar = path.read_bytes(), path.with_suffix(".json")
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "foreign":
        other = toolchain.compile_shared(ANSWER % 6, cache_dir=store)
        for suffix in (".so", ".json"):
            path.with_suffix(suffix).write_bytes(other.with_suffix(suffix).read_bytes())
    elif damage == "no sidecar":
        sidecar.unlink()
    elif damage == "half a sidecar":
        sidecar.write_bytes(sidecar.read_bytes()[:100])
    elif damage == "old schema":
        sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "schema": 0}))
    else:
        for entry in path.parent.iterdir():
            entry.unlink()
        path.parent.rmdir()
        path.parent.write_text("not a folder")
    with pytest.warns(paths.CacheWarning, match="set aside as"):
        again = toolchain.compile_shared(ANSWER % 5, cache_dir=store)
    assert again == path
    assert run(again) == 5
    assert path.parent.with_name(path.parent.name + ".bad-0").exists()


def test_a_rebuild_by_another_process_is_not_thrown_away(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader judges an entry damaged; before it renames it, another process has replaced it by a good
    one.
    """
    path = toolchain.compile_shared(ANSWER % 8, cache_dir=store)
    key, real, lies = artifact.read_sidecar(path).key, artifact.verify, [True]

    def stale_once(library: Path, expected: str | None = None) -> artifact.Sidecar:
        if lies and lies.pop():
            raise ToolchainError("what it was a moment ago")
        return real(library, expected)

    monkeypatch.setattr(artifact, "verify", stale_once)
    with pytest.warns(paths.CacheWarning):
        assert artifact.lookup(path.parent, "kernel", key) == path
    assert run(path) == 8


def test_processes_that_build_the_same_thing_both_win(store: Path, tmp_path: Path, repo_root: Path) -> None:
    """They meet inside the compiler, so that both publish; then threads do, more of them."""
    gate = (
        f"echo > {tmp_path}/at-$$; n=0\n"
        f"while [ $(ls {tmp_path} | grep -c '^at-') -lt 2 ] && [ $n -lt 500 ]; do\n"
        "sleep 0.01; n=$((n+1)); done"
    )
    cxx, log = counting(tmp_path, gate)
    code = (
        "import sys; from pathlib import Path; from kvgen.backends.cpu import toolchain, loader, compiler\n"
        f"cxx = compiler.Compiler({cxx.command!r}, {cxx.kind!r}, {cxx.version!r}, {cxx.triple!r})\n"
        f"path = toolchain.compile_shared({ANSWER % 9!r}, cache_dir=Path({str(store)!r}), compiler=cxx)\n"
        "print(path, loader.load(path).function('answer', []).raw(b''))"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code], cwd=repo_root, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(outputs) == 1
    assert outputs.pop().strip().endswith(" 9")
    assert log.read_text() == "x\nx\n"  # neither waited for the other
    assert len(list(store.iterdir())) == 1


def test_threads_that_build_the_same_thing_agree(store: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(toolchain.compile_shared(ANSWER % 3, cache_dir=store)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1


def test_a_compile_error_shows_the_first_lines_and_keeps_the_source(store: Path) -> None:
    with pytest.raises(toolchain.CompileError, match="undeclared_thing") as caught:
        toolchain.compile_shared(
            'extern "C" int f(const void*) { return undeclared_thing; }', name="bad", cache_dir=store
        )
    error = caught.value
    assert error.source.read_text().startswith('extern "C"')
    assert str(error.source) in str(error)
    assert "bad.cpp:1" in str(error)
    assert "undeclared_thing" in error.source.with_suffix(".log").read_text()
    with pytest.raises(toolchain.CompileError):  # a failure is no cache entry, and may be repeated
        toolchain.compile_shared(
            'extern "C" int f(const void*) { return undeclared_thing; }', name="bad", cache_dir=store
        )
    assert [p.name for p in store.iterdir()] == ["failed"]


def test_warnings_are_kept_beside_the_build(store: Path) -> None:
    path = toolchain.compile_shared(
        'extern "C" int answer(const void*) { int unused; return 1; }', cache_dir=store
    )
    assert "unused" in path.with_suffix(".log").read_text()


def test_a_compiler_that_takes_too_long_is_stopped(store: Path, tmp_path: Path) -> None:
    cxx, _ = counting(tmp_path, SLOW)
    start = time.monotonic()
    with pytest.raises(CompilerTimeout, match=r"killed after 0.3 s"):
        toolchain.compile_shared(ENDLESS, cache_dir=store, timeout_s=0.3, compiler=cxx)
    assert time.monotonic() - start < 5
    assert list(store.iterdir()) == []


def test_many_builds_give_one_outcome_each(store: Path, tmp_path: Path) -> None:
    cxx, _ = counting(tmp_path, SLOW)
    jobs = [
        Job((ANSWER % 1,)),
        Job(("this is not C++",)),
        Job((ENDLESS,), timeout_s=0.3),
        Job((ANSWER % 2,)),
        Job((ANSWER % 1,)),
    ]
    seen: dict[int, Outcome] = {}
    outcomes = compile_many(jobs, cache_dir=store, compiler=cxx, on_outcome=seen.__setitem__)
    statuses = [o.status.value for o in outcomes]
    assert statuses == ["ok", "compile_error", "timeout", "ok", "ok"]
    assert [seen[i] for i in range(5)] == outcomes
    assert [run(o.path) for o in outcomes if o.path] == [1, 2, 1]
    assert "this is not C++" not in outcomes[1].message
    assert "error" in outcomes[1].message
    assert all(o.seconds > 0 and bool(o.message) == (o.path is None) for o in outcomes)


def test_what_is_no_sources_fault_is_raised(store: Path) -> None:
    broken = Compiler((str(store / "absent"),), "gcc", "none", "x86_64-linux-gnu")
    with pytest.raises(ToolchainError, match="cannot start"):
        compile_many([Job((ANSWER % 1,))], cache_dir=store, compiler=broken)


def test_a_read_only_cache_that_holds_the_build_is_a_hit(
    own_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toolchain.compile_shared(ANSWER % 4)
    assert path.parent.parent == own_cache_dir / "build"

    def forbidden(folder: Path) -> Path:
        raise AssertionError("nothing may be written on a hit")

    monkeypatch.setattr(paths, "writable", forbidden)
    assert toolchain.compile_shared(ANSWER % 4) == path


def test_an_unwritable_cache_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(paths.CacheWarning, match="using"):
        path = toolchain.compile_shared(ANSWER % 44, cache_dir=tmp_path / "file" / "build")
    assert run(path) == 44


def test_a_disk_that_fills_up_while_compiling_costs_a_warning(store: Path, tmp_path: Path) -> None:
    full = f'case "$PWD" in {store}/*) echo "as: a.o: No space left on device" >&2; exit 1;; esac'
    cxx, log = counting(tmp_path, full)
    with pytest.warns(paths.CacheWarning, match="No space left on device"):
        path = toolchain.compile_shared(ANSWER % 45, cache_dir=store, compiler=cxx)
    assert run(path) == 45
    assert list(store.iterdir()) == []
    assert log.read_text() == "x\nx\n"


def test_leavings_of_killed_builds_go_after_a_day(store: Path) -> None:
    old, young = store / ".tmp-a-1", store / ".tmp-b-2"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "kernel.cpp").write_text("")
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    toolchain.compile_shared(ANSWER % 1, cache_dir=store)
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only", "-march=native"])
def test_flags_that_break_numbers_or_portability_are_refused(flag: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(flag)):
        toolchain.compile_shared(ANSWER % 1, flags=[flag])


@pytest.mark.parametrize(
    "options",
    [
        {"opt": "-O9"},
        {"name": "../up"},
        {"fp_contract": "on"},
        {"timeout_s": 0},
        {"sources": ()},
        {"sources": ("",)},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        Job(**{"sources": (ANSWER % 1,), **options})  # type: ignore[arg-type]


FMA = 'extern "C" int answer(const void* raw) { const double* a = static_cast<double* const*>(raw)[0]; '
FMA += "const_cast<double*>(a)[3] = a[0] * a[1] + a[2]; return 0; }\n"


@pytest.mark.isa("avx2")
def test_contraction_is_what_the_kernel_chose(store: Path) -> None:
    x = 1.0 + 2.0**-30
    separate, fused = (
        x * x - (1.0 + 2.0**-29),
        2.0**-60,
    )  # the product's last bit survives only in one rounding
    assert separate == 0.0
    for contract, expected in (("off", separate), ("fast", fused)):
        path = toolchain.compile_shared(
            FMA, flags=isa.flags_for("avx2"), fp_contract=contract, cache_dir=store
        )  # type: ignore[arg-type]
        values = np.array([x, x, -(1.0 + 2.0**-29), 9.0])
        load(path).function("answer", [("data", "ptr")])(values.ctypes.data)
        assert values[3] == expected


NAN = """
#include <cmath>
#include <cstdint>
extern "C" int answer(const void* raw) {
  float* const* planes = static_cast<float* const*>(raw);
  const float* x = planes[0];
  float* y = planes[1];
  for (int i = 0; i < 64; ++i) y[i] = std::isnan(x[i]) ? 1.f : std::isinf(x[i]) ? 2.f : x[i] < 0.f ? 3.f :
  x[i] - x[i]; return 0;
}
"""


@pytest.mark.parametrize("row", ["portable", pytest.param("avx512", marks=pytest.mark.isa("avx512"))])
def test_nan_and_inf_keep_their_meaning_when_vectorised(store: Path, row: str) -> None:
    x = np.resize(np.array([np.nan, np.inf, -np.inf, -1.0, 5.0], np.float32), 64)
    y = np.empty_like(x)
    path = toolchain.compile_shared(NAN, flags=isa.flags_for(row), cache_dir=store)
    load(path).function("answer", [("x", "ptr"), ("y", "ptr")])(x.ctypes.data, y.ctypes.data)
    assert y.tolist() == np.resize([1.0, 2.0, 2.0, 3.0, 0.0], 64).tolist()


@pytest.mark.skipif(isa.machine() != "x86_64", reason="x86-64 rows")
def test_a_row_that_this_cpu_may_lack_still_compiles(store: Path) -> None:
    text = '#include <immintrin.h>\nextern "C" int answer(const void* p) { __m512 x = _mm512_loadu_ps(p);'
    text += " return static_cast<int>(_mm512_reduce_add_ps(x)); }\n"
    path = toolchain.compile_shared(text, flags=isa.flags_for("avx512", ("bf16",)), cache_dir=store)
    assert set(artifact.read_sidecar(path).requires) == {*isa.ROWS["avx512"].required, "bf16"}
