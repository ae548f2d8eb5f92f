"""peak: how fast this CPU multiplies and adds, from registers, and does nothing else: the limit of prefill.

Measured like the read limit, next to the kernels: a neighbour or the clock moves both.
"""

from __future__ import annotations

import functools

import numpy as np

from kvgen.backends.cpu import isa, loader, toolchain
from kvgen.errors import UnsupportedError

FIELDS = (("steps", "i64"), ("threads", "i64"), ("seconds", "ptr"), ("sink", "ptr"))

CHAINS = 12
"""Independent sums: more than the latency of an instruction times how many start in a cycle."""

STEPS = 300_000
"""Rounds of all chains in a sample: about a millisecond."""

_FMA = "_mm{}_fmadd_ps(one, one, {{x}})"
_ONE = "_mm{}_set1_ps(1.0f)"
_INSTRUCTIONS = {
    # (row, arithmetic): (vector, zero, operand, ones, step, operations of a step)
    ("avx512", "bf16"): (
        "__m512",
        "_mm512_setzero_ps()",
        "__m512bh",
        "(__m512bh)_mm512_set1_epi16(0x3f80)",
        "_mm512_dpbf16_ps({x}, one, one)",
        64,
    ),
    ("avx512", "f32"): (
        "__m512", "_mm512_setzero_ps()", "__m512", _ONE.format(512), _FMA.format(512), 32,
    ),
    ("avx2", "f32"): (
        "__m256", "_mm256_setzero_ps()", "__m256", _ONE.format(256), _FMA.format(256), 16,
    ),
}  # fmt: skip


def kind_of(dtype: str) -> str | None:
    """The arithmetic that serves a type best here: ``bf16`` or ``f32``; None on a row without a figure."""
    row = isa.best_row().name
    if dtype == "bf16" and "bf16" in isa.cpu_features() and (row, "bf16") in _INSTRUCTIONS:
        return "bf16"
    return "f32" if (row, "f32") in _INSTRUCTIONS else None


def source(row: str, kind: str) -> str:
    """The C++ source for one ISA row and arithmetic."""
    vector, zero, operand, one, step, _ = _INSTRUCTIONS[row, kind]
    chains = [f"x{i}" for i in range(CHAINS)]
    # The empty asm hides values: the compiler would make one chain of twelve equal ones.
    start = "".join(f'  {vector} {x} = {zero};\n  asm volatile("" : "+v"({x}));\n' for x in chains)
    body = "".join(f"    {x} = {step.format(x=x)};\n" for x in chains)
    keep = "".join(f'  asm volatile("" ::"v"({x}));\n' for x in chains)
    return f"""\
// {kind} multiply-adds from registers with {row}: the time of them.
#include <chrono>
#include <cstdint>
#include <immintrin.h>

struct Args {{
  int64_t steps;
  int64_t threads;
  double* seconds;
  double* sink;
}};
static_assert(sizeof(Args) == 32);

static void work(int64_t steps) {{
  {operand} one = {one};
{start}  for (int64_t i = 0; i < steps; ++i) {{
    asm volatile("" : "+v"(one));
{body}  }}
{keep}}}

extern "C" int kvgen_peak(const void* raw) {{
  const Args& a = *static_cast<const Args*>(raw);
  if (a.threads < 1) return 1;
  std::chrono::steady_clock::time_point start, stop;
  if (a.threads == 1) {{
    start = std::chrono::steady_clock::now();
    work(a.steps);
    stop = std::chrono::steady_clock::now();
  }} else {{
#pragma omp parallel num_threads(static_cast<int>(a.threads))
    {{
#pragma omp barrier
#pragma omp master
      start = std::chrono::steady_clock::now();
      work(a.steps);
#pragma omp barrier
#pragma omp master
      stop = std::chrono::steady_clock::now();
    }}
  }}
  *a.seconds = std::chrono::duration<double>(stop - start).count();
  return 0;
}}
"""


@functools.cache
def _runner(row_name: str, kind: str) -> loader.Function:
    row = isa.ROWS[row_name]
    flags = isa.flags_for(row, ("bf16",) if kind == "bf16" else ())
    path = toolchain.compile_shared(source(row_name, kind), flags=flags, name="peak")
    return loader.load(path).function("kvgen_peak", FIELDS, {1: "no thread"})


def peak(kind: str, threads: int) -> float:
    """Multiplications and additions a second of ``bf16`` or ``f32`` arithmetic, one sample.

    Raises ``UnsupportedError`` for arithmetic that this CPU has no figure for, ``ToolchainError`` without a
    compiler.
    """
    row = isa.best_row().name
    if (row, kind) not in _INSTRUCTIONS:
        raise UnsupportedError(f"{kind} arithmetic: no figure for {row}")
    seconds = np.zeros(1, np.float64)
    _runner(row, kind)(STEPS, threads, seconds.ctypes.data, 0)
    return STEPS * CHAINS * _INSTRUCTIONS[row, kind][-1] * threads / float(seconds[0])
