"""bench: decode of a spec against torch's SDPA and the read limit of the same pool, in one process.

Contenders take turns, so that drift of the machine hits all of them; the figure is the median, and the
outputs are compared before anything is timed. SDPA gets its best form: contiguous K and V of the same
values in the query's type, query heads folded into rows (one K and V per KV head, no expansion).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvgen.backends.cpu import machine
from kvgen.backends.cpu.read_limit import read_limit
from kvgen.builder import build
from kvgen.errors import KvgenError, UnsupportedError
from kvgen.ir import Spec

if TYPE_CHECKING:
    import torch

    from kvgen.library import Library
    from kvgen.runtime.cache import Cache

CLOSE_ENOUGH = 2e-2
"""Largest difference of outputs, relative to the largest output: both sides round to bf16 or f16."""


@dataclass(frozen=True)
class Row:
    """One contender of one case."""

    contender: str
    median_us: float
    least_us: float
    gb_per_s: float
    """Bytes of the cache that this contender must read, over its median time."""
    ratio: float
    """Its median time over kvgen's: above 1, kvgen is faster."""


@dataclass(frozen=True)
class Report:
    """Decode of one spec."""

    spec: str
    batch: int
    context: int
    threads: int
    rounds: int
    read_limit_gb_per_s: float
    """Median of sequential reads of the same pool, sampled between the rounds."""
    fraction_of_read_limit: float
    """kvgen's bytes per second over the read limit."""
    largest_difference: float
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def bench_decode(
    spec: Spec,
    *,
    batch: int = 8,
    context: int = 4096,
    threads: int | None = None,
    rounds: int = 15,
    schedule: Mapping[str, Any] | None = None,
    tune: str = "cache",
) -> Report:
    """Time decode of ``batch`` requests of ``context`` keys on the CPU at hand.

    Raises ``UnsupportedError`` for a spec that SDPA cannot express (a window), ``KvgenError`` when the
    outputs disagree.
    """
    import torch

    if spec.attention.window is not None:
        raise UnsupportedError(
            "attention.window: decode with a window has no plain SDPA peer; bench without it"
        )
    threads = machine.num_threads(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        library = build(
            spec, tune=tune, schedule={"decode": dict(schedule)} if schedule else None, checked=False
        )
        return _measure(library, batch, context, threads, rounds)
    finally:
        torch.set_num_threads(before)


def _measure(library: Library, batch: int, context: int, threads: int, rounds: int) -> Report:
    cache, table, lens, q = _workload(library, batch, context)
    k, v = library.gather(cache, table, lens)
    peer, out_peer = _folded_sdpa(library.spec, q, k, v, batch)
    out, lse = library.decode(q, cache, table, lens, num_threads=threads)
    peer()
    difference = float((out.float() - out_peer().float()).abs().max() / out.float().abs().max())
    if not difference <= CLOSE_ENOUGH:
        raise KvgenError(
            f"decode and SDPA differ by {difference:.3g} of the largest output: nothing was timed"
        )

    def ours() -> None:
        library.decode(q, cache, table, lens, out=out, lse=lse, num_threads=threads)

    pool = max(cache.pools.values(), key=lambda slab: slab.numel())
    contenders = {"kvgen": ours, "torch SDPA, folded": peer}
    samples = _interleave(contenders, rounds, lambda: read_limit(pool, threads, 1).bytes_per_s)
    limit = statistics.median(samples.pop("limit"))
    ours_s = statistics.median(samples["kvgen"])
    bytes_of = {
        "kvgen": cache.record.page_bytes() * cache.num_pages,
        "torch SDPA, folded": k.numel() * k.element_size() + v.numel() * v.element_size(),
    }
    rows = tuple(_row(name, times, bytes_of[name], ours_s) for name, times in samples.items())
    fraction = bytes_of["kvgen"] / ours_s / limit
    return Report(library.spec.name, batch, context, threads, rounds, limit / 1e9, fraction, difference, rows)


def _row(name: str, times: Sequence[float], nbytes: int, ours_s: float) -> Row:
    median = statistics.median(times)
    return Row(name, median * 1e6, min(times) * 1e6, nbytes / median / 1e9, median / ours_s)


def _interleave(
    contenders: Mapping[str, Callable[[], None]], rounds: int, limit: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each contender, taking turns; the read limit is sampled once a round."""
    samples: dict[str, list[float]] = {name: [] for name in (*contenders, "limit")}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - start)
        samples["limit"].append(limit())
    return samples


def _workload(
    library: Library, batch: int, context: int
) -> tuple[Cache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A full cache with a random page table, filled through append so that every scale is right."""
    import torch

    att, page = library.spec.attention, library.spec.cache.page_size
    pages = -(-context // page)
    scales = {
        side: [0.02] * _scale_count(library.spec, side)
        for side in ("k", "v")
        if _is_static(library.spec, side)
    }
    cache = library.new_cache(batch * pages, scales=scales)
    random = torch.Generator().manual_seed(0)
    table = torch.randperm(batch * pages, generator=random).int().reshape(batch, pages)
    dtype = library.spec.attention.q_dtype
    for request in range(batch):
        k = torch.randn(context, att.kv_heads, att.head_dim, generator=random)
        v = torch.randn(context, att.kv_heads, att.v_head_dim, generator=random)
        tok = torch.arange(context)
        library.append(cache, k, v, table[request, tok // page].long() * page + tok % page)
    lens = torch.full((batch,), context, dtype=torch.int32)
    q = torch.randn(batch, att.q_heads, att.head_dim, generator=random)
    return (
        cache,
        table,
        lens,
        q.to({"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]),
    )


def _is_static(spec: Spec, side: str) -> bool:
    return spec.cache.quant(side).static_scale


def _scale_count(spec: Spec, side: str) -> int:
    return spec.attention.kv_heads if "head" in spec.cache.quant(side).scale_dims else 1


def _folded_sdpa(
    spec: Spec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int
) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """A call of SDPA on the same values, and one that returns its output in decode's shape."""
    from torch.nn import functional

    att = spec.attention
    context = k.shape[0] // batch
    q_BHGD = q.view(batch, att.kv_heads, att.group, att.head_dim)
    k_BHTD = k.view(batch, context, att.kv_heads, att.head_dim).transpose(1, 2).contiguous()
    v_BHTD = v.view(batch, context, att.kv_heads, att.v_head_dim).transpose(1, 2).contiguous()

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q_BHGD, k_BHTD, v_BHTD, scale=att.scale)

    def run() -> None:
        attend()

    return run, lambda: attend().reshape(batch, att.q_heads, att.v_head_dim)
