"""rivals: what the machine and torch do beside our kernels: copies, SDPA, flex_attention, index_copy_.

SDPA gets its best form: contiguous K and V of the same values in the query's type, query heads folded into
rows for decode. "gather + SDPA" is what a paged cache costs without a paged kernel: our gather, then SDPA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgen.gpu_check.library import CubinLibrary
from kvgen.gpu_check.scenes import Workload
from kvgen.gpu_check.stopwatch import Run
from kvgen.runtime.cache import torch_dtype

MOST_SETS = 4
"""Most copies of contiguous K and V that calls rotate over."""

COPY_BYTES = 1 << 30
"""Size of the buffer whose copy is the machine's limit."""


def copy(device: str, nbytes: int = COPY_BYTES) -> tuple[Run, int]:
    """A copy from device to device, and the bytes that one moves (read and written)."""
    import torch

    src = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return lambda turn: dst.copy_(src), 2 * nbytes


def attention(library: CubinLibrary, work: Workload) -> dict[str, Callable[[], Run]]:
    """Makers of rivals of decode and prefill by name; none where torch cannot express the case."""
    att = library.spec.attention
    if att.window is not None or (work.op == "prefill" and work.sizes[1] != work.sizes[2]):
        return {}  # no plain mask of torch's covers a window, or queries that begin inside the keys
    found = {"torch SDPA": lambda: _sdpa(library, work)}
    if work.op == "decode":
        found["gather + SDPA"] = lambda: _gather_sdpa(library, work)
    found["torch flex_attention"] = lambda: _flex(library, work)
    return found


def append(library: CubinLibrary, work: Workload) -> dict[str, Callable[[], Run]]:
    """A rival of append: rows of the same type put into a contiguous pool."""

    def make() -> Run:
        import torch

        k, v = (work.turns[0][name] for name in ("k_new", "v_new"))
        rows = library.spec.cache.page_size * work.cache.num_pages
        pools = [torch.zeros(rows, *t.shape[1:], dtype=t.dtype, device=t.device) for t in (k, v)]

        def run(turn: int) -> None:
            slots = work.turns[turn % len(work.turns)]["slots"]
            pools[0].index_copy_(0, slots, k)
            pools[1].index_copy_(0, slots, v)

        return run

    return {"torch index_copy_ (no quantisation)": make}


def output(library: CubinLibrary, work: Workload) -> Any:
    """What our kernel gives for the first turn, as SDPA shapes it: for the comparison of values."""
    values = work.turns[0]
    library.kernel(work.op, library.candidate(work.op).plan.variant).launch(values)
    return values["out"]


def _gathered(library: CubinLibrary, work: Workload, table: Any) -> tuple[Any, Any]:
    """The keys and values behind one table as views (B, kv_heads, T, d) in the query's type."""
    import torch

    att, batch, context = library.spec.attention, work.turns[0]["batch"], work.sizes[-1]
    # Given outputs: else the op reads back how many rows there are, and waits for the device.
    kind: dict[str, Any] = {"dtype": torch_dtype(att.q_dtype), "device": work.q.device}
    out = tuple(torch.empty(batch * context, att.kv_heads, d, **kind) for d in (att.head_dim, att.v_head_dim))
    k, v = library.gather(work.cache, table, work.turns[0]["kv_lens"], out=(out[0], out[1]))
    return tuple(t.view(batch, context, *t.shape[1:]).transpose(1, 2) for t in (k, v))


def _sets(library: CubinLibrary, work: Workload) -> list[tuple[Any, Any]]:
    """Contiguous keys and values of the first turns."""
    found = [_gathered(library, work, table) for table in work.tables[:MOST_SETS]]
    return [(k.contiguous(), v.contiguous()) for k, v in found]


def _query(library: CubinLibrary, work: Workload) -> Any:
    """Decode: (B, kv_heads, group, d), heads folded into rows. Prefill: (B, q_heads, T, d)."""
    att, batch = library.spec.attention, work.turns[0]["batch"]
    if work.op == "decode":
        return work.q.view(batch, att.kv_heads, att.group, att.head_dim)
    return work.q.view(batch, -1, att.q_heads, att.head_dim).transpose(1, 2).contiguous()


def _options(library: CubinLibrary, work: Workload) -> dict[str, Any]:
    att = library.spec.attention
    if work.op == "decode":
        return {"scale": att.scale}
    return {"scale": att.scale, "is_causal": att.causal, "enable_gqa": att.group > 1}


def _sdpa(library: CubinLibrary, work: Workload) -> Run:
    from torch.nn import functional

    q, options = _query(library, work), _options(library, work)
    sets = _sets(library, work)
    return lambda turn: functional.scaled_dot_product_attention(q, *sets[turn % len(sets)], **options)


def _gather_sdpa(library: CubinLibrary, work: Workload) -> Run:
    from torch.nn import functional

    q, options = _query(library, work), _options(library, work)

    def run(turn: int) -> Any:
        k, v = _gathered(library, work, work.tables[turn % len(work.tables)])
        return functional.scaled_dot_product_attention(q, k, v, **options)

    return run


def _flex(library: CubinLibrary, work: Workload) -> Run:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    att = library.spec.attention
    compiled = torch.compile(flex_attention, dynamic=False)
    q = work.q.view(work.turns[0]["batch"], -1, att.q_heads, att.head_dim).transpose(1, 2).contiguous()
    sets = _sets(library, work)
    mask = None
    if work.op == "prefill" and att.causal:
        size = work.sizes[-1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device=str(q.device))
    options: dict[str, Any] = {"scale": att.scale, "enable_gqa": att.group > 1, "block_mask": mask}
    return lambda turn: compiled(q, *sets[turn % len(sets)], **options)
