"""The read limit of a pool: how fast this machine reads these very bytes, in order, and does nothing else.

It is the denominator of every CPU figure: a decode kernel cannot be faster than reading its cache once.
Virtual machines change speed within seconds (37 or 60 GB/s with two threads here), so a sample is only good
next to the kernel it is compared with: same memory, same pages, same threads, interleaved. ``read_limit(...,
repeats=1)`` is one sample.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvgen.backends.cpu import isa, loader, machine, memory, toolchain
from kvgen.errors import ArgumentError

FIELDS = (("data", "ptr"), ("nbytes", "i64"), ("threads", "i64"), ("seconds", "ptr"), ("checksum", "ptr"))
"""The kernel's arguments: pool, its size, thread count; out: one double, one uint64."""

_VECTORS = {
    # row: (header, type, load, exclusive or)
    "avx512": ("#include <immintrin.h>", "__m512i", "_mm512_loadu_si512({})", "_mm512_xor_si512({}, {})"),
    "avx2": (
        "#include <immintrin.h>",
        "__m256i",
        "_mm256_loadu_si256(reinterpret_cast<const __m256i*>({}))",
        "_mm256_xor_si256({}, {})",
    ),
    "portable": ("", "uint64_t", "load64({})", "({} ^ {})"),
}


def source(row: isa.IsaRow) -> str:
    """The C++ source of the reader for one ISA row; its checksum proves that every word was read."""
    header, vector, load, fold = _VECTORS[row.name]
    width = 8 if row.name == "portable" else row.vector_bytes
    lanes = 8  # independent chains: one load a cycle needs more in flight than one chain allows
    zero = "".join(f"  {vector} x{i} = {vector}{{}};\n" for i in range(lanes))
    body = "".join(
        f"    x{i} = {fold.format(f'x{i}', load.format(f'p + {i * width}'))};\n" for i in range(lanes)
    )
    tree = [f"x{i}" for i in range(lanes)]
    while len(tree) > 1:
        tree = [fold.format(tree[i], tree[i + 1]) for i in range(0, len(tree), 2)]
    return f"""\
// Reads a buffer in order with {row.name} loads: the time, and the exclusive or of its words.
#include <chrono>
#include <cstdint>
#include <cstring>
{header}

struct Args {{
  const unsigned char* data;
  int64_t nbytes;
  int64_t threads;
  double* seconds;
  uint64_t* checksum;
}};
static_assert(sizeof(Args) == 40);

[[maybe_unused]] static inline uint64_t load64(const unsigned char* p) {{
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}}

// Exclusive or of the words in [p, end); the tail shorter than 8 bytes counts as zero-extended.
static uint64_t read(const unsigned char* p, const unsigned char* end) {{
{zero}  for (; end - p >= {lanes * width}; p += {lanes * width}) {{
{body}  }}
  {vector} folded = {tree[0]};
  uint64_t words[{width // 8}], sum = 0;
  std::memcpy(words, &folded, {width});
  for (uint64_t word : words) sum ^= word;
  for (; end - p >= 8; p += 8) sum ^= load64(p);
  uint64_t tail = 0;
  std::memcpy(&tail, p, static_cast<size_t>(end - p));
  return sum ^ tail;
}}

extern "C" int kvgen_read_limit(const void* raw) {{
  const Args& a = *static_cast<const Args*>(raw);
  const int64_t threads = a.threads;
  if (threads < 1 || a.nbytes < 0) return 1;
  // Whole 4 KB blocks per thread, so that no two threads share a line or a memory page.
  const int64_t share = (a.nbytes / threads + 4095) / 4096 * 4096;
  uint64_t sum = 0;
  std::chrono::steady_clock::time_point start, stop;
  if (threads == 1) {{
    start = std::chrono::steady_clock::now();
    sum = read(a.data, a.data + a.nbytes);
    stop = std::chrono::steady_clock::now();
  }} else {{
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(^ : sum)
    {{
      // The first barrier keeps the threads' start-up out of the measured time.
#pragma omp barrier
#pragma omp master
      start = std::chrono::steady_clock::now();
#pragma omp for schedule(static, 1)
      for (int64_t t = 0; t < threads; ++t) {{
        const int64_t low = t * share < a.nbytes ? t * share : a.nbytes;
        const int64_t high = low + share < a.nbytes && t + 1 < threads ? low + share : a.nbytes;
        sum ^= read(a.data + low, a.data + high);
      }}
#pragma omp master
      stop = std::chrono::steady_clock::now();
    }}
  }}
  *a.seconds = std::chrono::duration<double>(stop - start).count();
  *a.checksum = sum;
  return 0;
}}
"""


@dataclass(frozen=True)
class ReadLimit:
    """Samples of one buffer's sequential read."""

    samples: tuple[float, ...]
    """Bytes per second, in the order measured."""
    nbytes: int
    threads: int
    checksum: int
    """Exclusive or of the buffer's 64-bit little-endian words, the tail zero-extended."""
    in_cache: bool
    """The buffer is smaller than four times the last-level cache: the figure may be the cache's, not the
    memory's.
    """

    @property
    def bytes_per_s(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    def __str__(self) -> str:
        spread = f"{min(self.samples) / 1e9:.1f} to {max(self.samples) / 1e9:.1f}"
        note = ", may fit the cache" if self.in_cache else ""
        how = f"{self.threads} threads, {len(self.samples)} reads{note}"
        return f"{self.bytes_per_s / 1e9:.1f} GB/s ({spread}; {how})"


@functools.lru_cache(maxsize=4)
def _reader(row_name: str, cache_dir: Path | None) -> loader.Function:
    """The compiled reader of a row, kept so that a single sample costs a call and not a lookup."""
    row = isa.ROWS[row_name]
    text = source(row)
    path = toolchain.compile_shared(text, flags=isa.flags_for(row), name="read_limit", cache_dir=cache_dir)
    return loader.load(path).function("kvgen_read_limit", FIELDS, {1: "negative size or no thread"})


def read_limit(
    buffer: Any,
    threads: int | None = None,
    repeats: int = 5,
    *,
    row: isa.IsaRow | None = None,
    cache_dir: Path | None = None,
) -> ReadLimit:
    """Read a buffer in order, ``repeats`` times.

    Memory that was never written has no pages of its own (all read one shared page of zeros, from the cache):
    a pool must have been filled before, or the figure is far too good.

    Args:
        buffer: contiguous CPU tensor or array of any type.
        threads: default: ``machine.num_threads()``.
        repeats: samples to take.
        row: instructions to read with; default: the best of this CPU.
        cache_dir: folder of builds; default: the user cache.

    Raises:
        ArgumentError: an empty or strided buffer, no repeats, a bad thread count.
        ToolchainError: no compiler.
        UnsupportedError: this CPU lacks the row.
    """
    flat = memory.as_bytes(buffer)
    if repeats < 1 or flat.nbytes == 0:
        raise ArgumentError(f"repeats = {repeats!r}, buffer of {flat.nbytes} bytes: both must be at least 1")
    count = machine.num_threads(threads)
    read = _reader((row or isa.best_row()).name, cache_dir)
    seconds, checksum = np.zeros(1, np.float64), np.zeros(1, np.uint64)
    samples = []
    for _ in range(repeats):
        read(flat.ctypes.data, flat.nbytes, count, seconds.ctypes.data, checksum.ctypes.data)
        samples.append(flat.nbytes / max(float(seconds[0]), 1e-9))
    facts = machine.snapshot()
    return ReadLimit(tuple(samples), flat.nbytes, count, int(checksum[0]), flat.nbytes < 4 * facts.l3_bytes)
