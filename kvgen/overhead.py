"""overhead: what one call costs beside the memory it reads, from Python and from C, on the smallest input.

One request of a few keys, so that the kernel has next to nothing to do. The C figure is that of a caller that
holds the argument struct already: the query (are the values good, how much workspace?), then the launch.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvgen.backends.cpu import isa, loader, toolchain
from kvgen.builder import build
from kvgen.capture import Capture
from kvgen.ir import Spec
from kvgen.runtime.ops import CacheOps

if TYPE_CHECKING:
    from kvgen.backends.cpu.kernel import CpuKernel
    from kvgen.library import Library

KEYS = 5
"""Keys of the one request."""

TINY = {
    "name": "tiny",
    "attention": {"q_heads": 8, "kv_heads": 2, "head_dim": 64},
    "cache": {
        "layout": "page kv head tok d",
        "page_size": 16,
        "k": {"format": "bf16"},
        "v": {"format": "bf16"},
    },
}
"""A spec whose kernels have next to nothing to do."""

CALLS = 200
"""Calls of one sample: short enough that on a busy machine some samples run undisturbed."""

SAMPLES = 150
"""Samples of each figure; the least and the median are reported."""

SOURCE = """\
// Calls a kernel as a C program would: query, then launch, many times; the time of all calls.
#include <chrono>
#include <cstdint>

struct Args {
  int64_t (*query)(const void*, int64_t, int64_t);
  int (*launch)(const void*);
  const void* args;
  int64_t num_pages;
  int64_t rows;
  int64_t calls;
  double* seconds;
};

extern "C" int kvgen_overhead(const void* raw) {
  const Args& a = *static_cast<const Args*>(raw);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < a.calls; ++i) {
    if (a.query(a.args, a.num_pages, a.rows) < 0 || a.launch(a.args) != 0) return 1;
  }
  *a.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return 0;
}
"""

FIELDS = (
    ("query", "ptr"), ("launch", "ptr"), ("args", "ptr"), ("num_pages", "i64"), ("rows", "i64"),
    ("calls", "i64"), ("seconds", "ptr"),
)  # fmt: skip


@dataclass(frozen=True)
class Overhead:
    """What a call of one op costs, in microseconds."""

    spec: str
    op: str
    call: str
    """``python, checked``, ``python, unchecked`` or ``c``."""
    least_us: float
    median_us: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def measure(spec: Spec, *, threads: int = 1, samples: int | None = None) -> list[Overhead]:
    """Overheads of decode and append with everything given, on ``threads`` threads, of the CPU at hand.

    All figures take turns, sample by sample. Raises ``ToolchainError`` where nothing compiles.
    """
    library = build(spec, tune="off")
    scene = _Scene(library, threads)
    runs: dict[tuple[str, str], Callable[[], float]] = {}
    for op in ("decode", "append"):
        runs[op, "python, checked"] = _python(library, getattr(scene, op), checked=True)
        runs[op, "python, unchecked"] = _python(library, getattr(scene, op), checked=False)
        runs[op, "c"] = _c(library, scene, op)
    found: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(SAMPLES if samples is None else samples):
        for key, run in runs.items():
            found[key].append(run() * 1e6)
    return [
        Overhead(spec.name, op, call, min(times), statistics.median(times))
        for (op, call), times in found.items()
    ]


class _Scene:
    """One request with its outputs and workspace, and calls of ops on them."""

    def __init__(self, library: Library, threads: int) -> None:
        import torch

        from kvgen.runtime.cache import torch_dtype

        att, cache = library.spec.attention, library.spec.cache
        static = [side for side in cache.fields if cache.quant(side).static_scale]
        heads = {side: att.kv_heads if "head" in cache.quant(side).scale_dims else 1 for side in static}
        scales = {side: [0.02] * count for side, count in heads.items()}
        dtype = torch_dtype(att.q_dtype)
        self.cache = library.new_cache(-(-KEYS // cache.page_size), scales=scales or None)
        self.threads = threads
        self._read: tuple[Any, ...] = (
            torch.randn(1, att.q_heads, att.head_dim).to(dtype),
            self.cache,
            torch.arange(self.cache.num_pages, dtype=torch.int32)[None],
            torch.tensor([KEYS], dtype=torch.int32),
        )
        self._new = (
            torch.randn(1, att.kv_heads, att.head_dim).to(dtype),
            torch.randn(1, att.kv_heads, att.v_head_dim).to(dtype),
            torch.tensor([KEYS - 1]),
        )
        need = library.workspace_bytes("decode", *self._read, num_threads=threads)
        self._made: dict[str, Any] = {
            "out": torch.empty(1, att.q_heads, att.v_head_dim, dtype=dtype),
            "lse": torch.empty(1, att.q_heads),
            "workspace": torch.empty(max(need, 64), dtype=torch.uint8),
        }

    def decode(self, ops: CacheOps) -> None:
        """Attention of one query over a few keys, everything given."""
        ops.decode(*self._read, **self._made, num_threads=self.threads)

    def append(self, ops: CacheOps) -> None:
        """One token."""
        ops.append(self.cache, *self._new)


def _python(library: Library, call: Callable[[CacheOps], None], *, checked: bool) -> Callable[[], float]:
    """A sample: seconds of one call from Python."""

    def run() -> float:
        library.checked = checked
        call(library)
        start = time.perf_counter()
        for _ in range(CALLS):
            call(library)
        return (time.perf_counter() - start) / CALLS

    return run


def _c(library: Library, scene: _Scene, op: str) -> Callable[[], float]:
    """A sample: seconds of one call from C, made with a struct that is ready."""
    seen = Capture(library.spec)
    getattr(scene, op)(seen)
    kernel: CpuKernel = library.kernel(seen.op, seen.variant)  # type: ignore[assignment]
    struct = kernel.struct(seen.values | {"num_threads": scene.threads})
    seconds = (ctypes.c_double * 1)()
    flags = isa.flags_for(isa.ROWS["portable"])
    path = toolchain.compile_shared(SOURCE, flags=flags, name="overhead")
    loop = loader.load(path).function("kvgen_overhead", FIELDS, {1: "the kernel refused its arguments"})
    rows = 1 if op == "decode" else 0
    held = ctypes.create_string_buffer(struct, len(struct))
    launch, query = kernel.addresses

    def run() -> float:
        loop(
            query,
            launch,
            ctypes.addressof(held),
            scene.cache.num_pages,
            rows,
            CALLS,
            ctypes.addressof(seconds),
        )
        return seconds[0] / CALLS

    return run
