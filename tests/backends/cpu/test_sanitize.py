"""The sanitizer runner: broken kernels are reported, right ones pass, with numpy and with torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kvgen.backends.cpu import compiler
from kvgen.backends.cpu.toolchain import compile_shared
from kvgen.errors import ToolchainError
from tests.support.sanitize import run_sanitized

# Whole vectors only: n rounded up, so the last one reads past the row unless n is a multiple of 8.
SCALE = """
#include <cstdint>
struct Args { const float* x; float* y; int64_t n; int64_t step; };
typedef float vector __attribute__((vector_size(32), aligned(4)));
extern "C" int scale(const void* raw) {
  const Args& a = *static_cast<const Args*>(raw);
  float total = 0.f;
  for (int64_t i = 0; i < a.n; i += 8) {
    const vector v = *reinterpret_cast<const vector*>(a.x + i);
    for (int64_t j = 0; j < 8 && i + j < a.n; ++j) total += v[j];
  }
  *a.y = total;
  return 0;
}
extern "C" int shift(const void* raw) {
  const Args& a = *static_cast<const Args*>(raw);
  *a.y = static_cast<float>(1 << a.step);
  return 0;
}
"""
# GCC's runtime calls it unknown when the access begins inside the buffer and is not aligned to its own size.
OVERRUN = "AddressSanitizer: (heap-buffer-overflow|unknown-crash)"
RUN = """
import sys
import numpy as np
from kvgen.backends.cpu.loader import load
name, n, step = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
function = load(sys.argv[1]).function(name, [("x", "ptr"), ("y", "ptr"), ("n", "i64"), ("step", "i64")])
x, y = np.ones(n, np.float32), np.zeros(1, np.float32)
function(x.ctypes.data, y.ctypes.data, n, step)
print(y[0])
"""
# One process for both calls, because torch's import takes seconds under the sanitizer: first right, then
# wrong.
WITH_TORCH = """
import sys
import torch
from kvgen.backends.cpu.loader import load
function = load(sys.argv[1]).function("scale", [("x", "ptr"), ("y", "ptr"), ("n", "i64"), ("step", "i64")])
for n in (24, 61):
    x, y = torch.ones(n), torch.zeros(1)
    function(x.data_ptr(), y.data_ptr(), n, 0)
    print(y.item(), flush=True)
"""


def build(name: str) -> tuple[Path, compiler.Compiler]:
    if name and shutil.which(name) is None:
        pytest.skip(f"no {name} on this machine")
    found = compiler.identify(name) if name else compiler.find_compiler()
    try:
        compiler.sanitizer_libraries(found)
    except ToolchainError as error:
        pytest.skip(str(error))
    return compile_shared(SCALE, sanitize=True, opt="-O1", name="scale", compiler=found), found


@pytest.fixture(scope="module", params=["", "clang++"], ids=["default", "clang"])
def built(request: pytest.FixtureRequest) -> tuple[Path, compiler.Compiler]:
    return build(request.param)


def test_a_right_call_passes(built: tuple[Path, compiler.Compiler]) -> None:
    path, cxx = built
    assert run_sanitized(RUN, path, "scale", "24", "0", compiler=cxx).check() == "24.0\n"
    assert run_sanitized(RUN, path, "shift", "8", "3", compiler=cxx).check() == "8.0\n"


def test_reading_one_vector_too_far_is_reported(built: tuple[Path, compiler.Compiler]) -> None:
    path, cxx = built
    run = run_sanitized(RUN, path, "scale", "21", "0", compiler=cxx)
    assert run.returncode != 0
    source = re.escape(str(path.with_suffix(".cpp")))  # the kept source, not the folder it was compiled in
    with pytest.raises(AssertionError, match=rf"(?s){OVERRUN}.*READ of size 32.*{source}:9"):
        run.check()


def test_undefined_behaviour_is_reported(built: tuple[Path, compiler.Compiler]) -> None:
    path, cxx = built
    run = run_sanitized(RUN, path, "shift", "8", "40", compiler=cxx)
    with pytest.raises(AssertionError, match="shift exponent 40 is too large"):
        run.check()


def test_torch_works_under_the_sanitizer_and_its_buffers_are_watched() -> None:
    pytest.importorskip("torch")
    path, cxx = build("")
    run = run_sanitized(WITH_TORCH, path, compiler=cxx)
    assert run.stdout == "24.0\n"
    with pytest.raises(AssertionError, match=OVERRUN):
        run.check()


def test_a_snippet_that_fails_by_itself_is_told_from_a_report() -> None:
    _, cxx = build("")
    run = run_sanitized("raise SystemExit('plain failure')", compiler=cxx)
    assert run.report == ""
    with pytest.raises(AssertionError, match=r"(?s)status 1.*plain failure"):
        run.check()
    run = run_sanitized("import os; os.abort()", compiler=cxx)
    with pytest.raises(AssertionError, match="SIGABRT"):
        run.check()
