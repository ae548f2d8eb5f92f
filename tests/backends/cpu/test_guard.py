"""The guards themselves: kernels that read or write one step too far must not get away with it."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from kvgen.backends.cpu import isa
from kvgen.backends.cpu.loader import Function, load
from kvgen.backends.cpu.toolchain import compile_shared
from tests.support.guard import guarded_array, guarded_bytes, guarded_tensor, run_guarded

FIELDS = [("x", "ptr"), ("y", "ptr"), ("n", "i64")]
# Correct for every n: whole vectors, then the rest one by one. BROKEN rounds n up to whole vectors, the
# classic fault: right results on any ordinary buffer, because what is read too much is never stored.
SUM = """
#include <cstdint>
#include <immintrin.h>
struct Args { const float* x; float* y; int64_t n; };
extern "C" int sum(const void* raw) {
  const Args& a = *static_cast<const Args*>(raw);
  __m512 total = _mm512_setzero_ps();
  float rest = 0.f;
  int64_t i = 0;
#ifdef BROKEN
  for (; i < a.n; i += 16) {
    const __mmask16 m = a.n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (a.n - i)) - 1);
    __m512 v = _mm512_loadu_ps(a.x + i);
    asm volatile("" : "+v"(v));  // or GCC folds the load into a masked addition, which does not fault
    total = _mm512_mask_add_ps(total, m, total, v);
  }
#else
  for (; i + 16 <= a.n; i += 16) total = _mm512_add_ps(total, _mm512_loadu_ps(a.x + i));
  for (; i < a.n; ++i) rest += a.x[i];
#endif
  *a.y = _mm512_reduce_add_ps(total) + rest;
  return 0;
}
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, Function]:
    flags = isa.flags_for("avx512")
    builds = {"right": flags, "broken": (*flags, "-DBROKEN")}
    return {
        n: load(compile_shared(SUM, flags=f, name="sum")).function("sum", FIELDS) for n, f in builds.items()
    }


@pytest.mark.isa("avx512")
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_a_kernel_that_reads_one_vector_too_far_is_caught(kernels: dict[str, Function], n: int) -> None:
    ordinary = np.ones(n + 16, np.float32)
    x = guarded_array((n,), np.float32, fill=1.0)
    y = guarded_array((1,), np.float32)
    for name in ("right", "broken"):
        kernels[name](ordinary.ctypes.data, y.ctypes.data, n)
        assert y[0] == n  # on an ordinary buffer both are right: this is why guards are needed
        y[0] = np.nan
        run = run_guarded(lambda name=name: kernels[name](x.ctypes.data, y.ctypes.data, n))  # type: ignore[misc]
        if name == "right" or n % 16 == 0:
            run.check()
            assert y[0] == n  # the child's result is here: the memory is shared
        else:
            assert run.signal == "SIGSEGV"
            assert np.isnan(y[0])
            with pytest.raises(AssertionError, match="died by SIGSEGV"):
                run.check()


@pytest.mark.parametrize(("where", "offset"), [("end", 0), ("begin", -1)])
@pytest.mark.parametrize("nbytes", [1, 64, 4095, 4096, 4097, 20_000])
def test_the_first_byte_outside_faults_and_the_last_inside_does_not(
    where: str, offset: int, nbytes: int
) -> None:
    data = guarded_bytes(nbytes, where)  # type: ignore[arg-type]
    assert data.shape == (nbytes,)
    assert (data == 255).all()
    edge = data.ctypes.data + (nbytes if where == "end" else 0) + offset
    assert edge % mmap.PAGESIZE in (0, mmap.PAGESIZE - 1)
    import ctypes

    assert run_guarded(lambda: ctypes.string_at(edge, 1) and None).signal == "SIGSEGV"
    assert run_guarded(lambda: ctypes.memset(edge, 0, 1) and None).signal == "SIGSEGV"
    inside = data.ctypes.data + (nbytes - 1 if where == "end" else 0)
    assert run_guarded(lambda: ctypes.string_at(inside, 1)[0]).check() == 255


def test_whole_pages_are_guarded_at_both_ends() -> None:
    import ctypes

    data = guarded_bytes(2 * mmap.PAGESIZE)
    for edge in (data.ctypes.data - 1, data.ctypes.data + data.nbytes):
        assert run_guarded(lambda edge=edge: ctypes.string_at(edge, 1)[0]).signal == "SIGSEGV"  # type: ignore[misc]


def test_alignment_moves_the_start_and_never_past_the_page() -> None:
    for nbytes in (1, 63, 64, 65, 5000):
        data = guarded_bytes(nbytes, align=64)
        assert data.ctypes.data % 64 == 0
        slack = -(data.ctypes.data + nbytes) % mmap.PAGESIZE
        assert slack == -nbytes % 64
    for arguments in ((-1, "end", 1), (1, "middle", 1), (1, "end", 3), (1, "end", 8192)):
        with pytest.raises(ValueError, match="nbytes"):
            guarded_bytes(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_]
)
def test_arrays_are_poisoned(dtype: type) -> None:
    array = guarded_array((3, 0, 2), dtype)
    assert array.size == 0
    array = guarded_array((3, 5), dtype)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        assert np.isnan(array).all()
    else:
        assert (array == (True if kind.kind == "b" else np.iinfo(kind).max)).all()
    assert (array.ctypes.data + array.nbytes) % mmap.PAGESIZE == 0
    assert (guarded_array((3, 5), dtype, fill=1) == 1).all()


def test_tensors_of_every_type_are_poisoned() -> None:
    torch = pytest.importorskip("torch")
    floats = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    for dtype in floats:
        tensor = guarded_tensor((3, 7), dtype)
        assert tensor.float().isnan().all(), dtype
        assert (tensor.data_ptr() + tensor.nbytes) % mmap.PAGESIZE == 0
        assert guarded_tensor((0, 7), dtype).shape == (0, 7)
    for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8):
        assert (guarded_tensor((5,), dtype) == torch.iinfo(dtype).max).all()
    assert guarded_tensor((5,), torch.bool).all()
    assert (guarded_tensor((2, 3), torch.bfloat16, fill=2.0) == 2).all()


def test_what_the_child_says_comes_back() -> None:
    assert run_guarded(lambda: {"a": [1, 2.5, None]}).check() == {"a": [1, 2.5, None]}
    assert run_guarded(lambda: None).ok
    assert len(run_guarded(lambda: "x" * 1_000_000).check()) == 1_000_000  # more than a pipe holds

    def fails() -> None:
        assert 1 == 2, "one is not two"

    run = run_guarded(fails)
    assert not run.ok
    with pytest.raises(AssertionError, match="one is not two"):
        run.check()
    assert "no JSON type" in run_guarded(object).error
    assert "exited with 7" in run_guarded(lambda: os._exit(7)).error
    assert run_guarded(os.abort).signal == "SIGABRT"


def test_a_child_that_hangs_is_killed() -> None:
    start = time.monotonic()
    assert run_guarded(lambda: time.sleep(30), timeout_s=0.3).error == "killed after 0.3 s"
    assert time.monotonic() - start < 10


TEAM = """
#include <cstdint>
extern "C" int team(const void* raw) {
  int64_t seen = 0;
#pragma omp parallel num_threads(2) reduction(+ : seen)
  seen += 1;
  **static_cast<int64_t* const*>(raw) = seen;
  return 0;
}
"""


def test_kernels_with_threads_run_in_the_child(tmp_path: Path) -> None:
    """This process has a pool already, which a plain fork would wait for until the end of time."""
    team = load(compile_shared(TEAM, cache_dir=tmp_path)).function("team", [("seen", "ptr")])
    seen = guarded_array((1,), np.int64)
    team(seen.ctypes.data)
    seen[0] = 0
    run_guarded(lambda: team(seen.ctypes.data), timeout_s=20).check()
    assert seen[0] == 2
