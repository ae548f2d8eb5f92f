"""One OpenMP runtime in a process, whoever comes first; threads that follow the argument and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.backends.cpu import compiler, openmp, toolchain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the dynamic linker's rules are Linux's")

TEAM = r"""
#include <cstdint>
#include <omp.h>
struct Args { int64_t threads; int64_t* team; };
extern "C" int team(const void* raw) {
  const Args& a = *static_cast<const Args*>(raw);
  int64_t seen = 0;
#pragma omp parallel num_threads(static_cast<int>(a.threads)) reduction(+ : seen)
  seen += 1;
  *a.team = seen;
  return 0;
}
extern "C" int ceiling(const void*) { return omp_get_max_threads(); }
"""
PRELUDE = """
import ctypes, json, sys
from pathlib import Path
from kvgen.backends.cpu import loader, openmp
def kernel():
    library = loader.load(sys.argv[1])
    function, out = library.function("team", [("threads", "i64"), ("team", "ptr")]), ctypes.c_int64()
    def team(threads):
        function(threads, ctypes.addressof(out))
        return out.value
    return team, library.function("ceiling", [])
def runtimes():
    return [path.name for path in openmp.in_process()]
"""


@pytest.fixture(scope="module")
def library() -> Path:
    return toolchain.compile_shared(TEAM, name="team")


def snippet(
    repo_root: Path, code: str, *args: object, flags: tuple[str, ...] = ("-W", "error::RuntimeWarning")
) -> str:
    command = [sys.executable, *flags, "-c", PRELUDE + code, *map(str, args)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_do_not_depend_on_a_runtime_of_their_own(library: Path) -> None:
    if openmp.links_runtime(compiler.find_compiler().kind, compiler.find_compiler().triple):
        pytest.skip("this compiler's runtime has to be linked")
    assert b"libgomp.so" not in library.read_bytes()


@pytest.mark.parametrize("first", ["kernel", "torch"])
def test_torch_and_kernels_share_one_runtime_and_keep_their_own_counts(
    repo_root: Path, library: Path, first: str
) -> None:
    if compiler.find_compiler().kind != "gcc":
        pytest.skip("GCC's runtime")
    order = ["team, ceiling = kernel(); team(2)", "import torch; torch.ones(1 << 20).add_(1)"]
    code = "\n".join(order if first == "kernel" else reversed(order))
    code += (
        "\nbefore = torch.get_num_threads(); sizes = [team(3), team(1)]"
        "\nuntouched = torch.get_num_threads() == before"
        "\ntorch.set_num_threads(1); print(len(runtimes()), sizes, untouched, team(2))"
    )
    assert snippet(repo_root, code, library) == "1 [3, 1] True 2"


def test_torchs_own_copy_is_used_before_torch_is_imported(repo_root: Path, library: Path) -> None:
    """With a hashed soname, anything else would be a second runtime as soon as torch comes."""
    folder = openmp.torch_folder()
    if compiler.find_compiler().kind != "gcc" or folder is None or not list(folder.glob("libgomp*")):
        pytest.skip("GCC's runtime, and a torch that brings one")
    code = "kernel(); print([str(path.parent) for path in openmp.in_process()], 'torch' in sys.modules)"
    assert snippet(repo_root, code, library) == f"{[str(folder)]} False"


def test_a_runtime_with_another_name_is_used_rather_than_a_second_one(
    repo_root: Path, library: Path, tmp_path: Path
) -> None:
    """CUDA builds of torch bring libgomp under a hashed name; so does any wheel that auditwheel repaired."""
    if compiler.find_compiler().kind != "gcc":
        pytest.skip("GCC's runtime")
    original = openmp.provide()
    assert original is not None
    data = original.read_bytes()
    hashed = tmp_path / "libgomp-a34b3233.so.1"
    hashed.write_bytes(
        data.replace(b"libgomp.so.1\0", b"libgomp.so.9\0")
    )  # the soname; same length, still an ELF
    assert hashed.read_bytes() != data
    code = "other = ctypes.CDLL(sys.argv[2]); team, _ = kernel(); print(team(2), runtimes())"
    assert snippet(repo_root, code, library, hashed) == f"2 ['{hashed.name}']"


def test_a_forked_child_can_run_kernels_from_a_new_thread(repo_root: Path, library: Path) -> None:
    code = (
        "import os, threading\nteam, _ = kernel(); team(2); r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    t = threading.Thread(target=lambda: os.write(w, str(team(2)).encode()))\n"
        "    t.start(); t.join(20); os._exit(0)\n"
        "os.close(w); print(os.read(r, 9).decode(), team(2))"
    )
    assert snippet(repo_root, code, library) == "2 2"


def test_several_runtimes_are_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_warned", False)
    monkeypatch.setattr(openmp, "in_process", lambda: [Path("/a/libgomp.so.1"), Path("/b/libomp.so.5")])
    openmp.warn_if_several(linked=False)  # somebody else's libomp is not ours to complain about
    with pytest.warns(RuntimeWarning, match=r"/a/libgomp.so.1, /b/libomp.so.5.*KVGEN_NUM_THREADS=1"):
        openmp.warn_if_several(linked=True)
    openmp.warn_if_several(linked=True)  # once: a second warning would be an error here
    monkeypatch.setattr(openmp, "_warned", False)
    monkeypatch.setattr(openmp, "in_process", lambda: [Path("/a/libgomp.so.1"), Path("/b/libgomp-1.so")])
    with pytest.warns(RuntimeWarning):
        openmp.warn_if_several(linked=False)


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++ on this machine")
def test_clang_builds_work_and_say_that_they_bring_a_runtime(repo_root: Path) -> None:
    path = toolchain.compile_shared(TEAM, name="team", compiler=compiler.identify("clang++"))
    code = "import torch\nteam, _ = kernel(); print(team(2), len(runtimes()))"
    command = [sys.executable, "-c", PRELUDE + code, str(path)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "2 2"
    assert "several OpenMP runtimes" in done.stderr
