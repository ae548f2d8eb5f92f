"""cascade: decode of requests that share a prefix, whose pages are read once for all of them.

One pass of all queries over the shared prefix, one of each request's queries over its own keys, one merge of
the two states. A query's answer is that of ``decode`` over the prefix's pages followed by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.backends.cpu import machine
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.runtime import arguments as check
from kvgen.runtime import places
from kvgen.runtime.base import Tensor
from kvgen.runtime.cache import torch_dtype
from kvgen.runtime.params import SINK
from kvgen.runtime.renamed import accept_former_names

if TYPE_CHECKING:
    from kvgen.runtime.cache import Cache
    from kvgen.runtime.ops import CacheOps

DECODE_ROWS = 8
"""Up to so many queries of one request run in decode everywhere (semantics: a mixed step is two launches)."""

ALIGN = 64
"""Bytes on which each part of the workspace starts."""


@accept_former_names
def cascade(
    library: CacheOps,
    q: Tensor,
    cache: Cache,
    prefix_table: Tensor,
    prefix_len: int | Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    scale: float | None = None,
    params: Mapping[str, Tensor] | None = None,
    workspace: Tensor | None = None,
    num_threads: int | None = None,
    finalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of each request's queries over a prefix that all share, then over the request's own keys.

    prefix_table (P,) int32 and prefix_len (an int, or (1,) int32): the first ``prefix_len`` keys of every
    request, whose last page may be filled in part. page_table (B, P) and kv_lens (B,) int32: the pages and
    keys that follow, this step's included. The rest, and what is returned, as for ``decode``.
    Raises ``UnsupportedError`` for masks and scores that read positions: the prefix has one pass for all.
    """
    _need_supported(library, cache)
    given = (q, cache, prefix_table, prefix_len, page_table, kv_lens, q_starts)
    rows, nbytes = _check(library, *given)
    if not hasattr(prefix_len, "data_ptr"):
        prefix_len = int(prefix_len)  # numpy's integers are integers
    library.kernel(_op_of_prefix(library, cache, rows, num_threads), "prefix")  # or there is none, and why
    if not rows:
        return library._outputs(out, lse, 0, q.dtype, cache.device)
    apart = {name: t for name, t in (("out", out), ("lse", lse), ("workspace", workspace)) if t is not None}
    for name, tensor in apart.items():
        places.need_tensor(name, tensor)
    if workspace is not None:
        check.need_workspace(workspace, nbytes, cache.device)
    if apart:
        read = {"q": q, "prefix_table": prefix_table, "page_table": page_table, "kv_lens": kv_lens}
        read |= {} if q_starts is None else {"q_starts": q_starts}
        places.need_apart(apart, read | cache.fields())
    held = check.empty("workspace", (nbytes,), _bytes(), cache.device) if workspace is None else workspace
    outs, lses, starts, lens = _carve(library, held, rows)
    rest = None if workspace is None else workspace.view(-1).view(_bytes())[nbytes:]
    starts[:1].fill_(0)
    starts[1:].fill_(rows)
    if isinstance(prefix_len, int):
        lens.fill_(prefix_len)
    how: dict[str, Any] = {"scale": scale, "params": params, "workspace": rest, "num_threads": num_threads}
    shared = (prefix_table[None], lens if isinstance(prefix_len, int) else prefix_len, starts)
    own = (page_table, kv_lens, q_starts)
    try:
        _prefix(library, q, cache, shared, outs[0], lses[0], **how)
        library.decode(q, cache, *own, out=outs[1], lse=lses[1], finalize=False, **how)
    except ArgumentError:
        if workspace is not None:  # a pass knows only its part of it
            whole = cascade_workspace_bytes(library, *given, params=params, num_threads=num_threads)
            check.need_workspace(workspace, whole, cache.device)
        raise
    sinks = {SINK.name: (params or {}).get(SINK.name)} if library.spec.attention.sink else None
    return library.merge(outs, lses, out=out, lse=lse, params=sinks, finalize=finalize)


@accept_former_names
def cascade_workspace_bytes(
    library: CacheOps,
    q: Tensor,
    cache: Cache,
    prefix_table: Tensor,
    prefix_len: int | Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor | None = None,
    *,
    params: Mapping[str, Tensor] | None = None,
    num_threads: int | None = None,
) -> int:
    """Bytes that ``workspace=`` must hold for ``cascade`` with these arguments."""
    import torch

    _need_supported(library, cache)
    given = (q, cache, prefix_table, prefix_len, page_table, kv_lens, q_starts)
    rows, states = _check(library, *given)
    if not hasattr(prefix_len, "data_ptr"):
        prefix_len = int(prefix_len)
    if not rows:
        return states
    own = (page_table, kv_lens, q_starts)
    suffix = library.workspace_bytes("decode", q, cache, *own, params=params, num_threads=num_threads)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=cache.device)
    lens = prefix_len
    if isinstance(prefix_len, int):
        lens = torch.tensor([prefix_len], dtype=torch.int32, device=cache.device)
    given_params = library._parts(params, True, q)
    tables = (prefix_table[None], lens, starts)
    values = library._attention(q, cache, *tables, None, given_params, num_threads)
    op = _op_of_prefix(library, cache, rows, num_threads)
    return states + max(suffix, library.kernel(op, "prefix").workspace(values))


def _need_supported(library: CacheOps, cache: Cache) -> None:
    """Refuse a spec whose masks, scores or positions a cascade would get wrong."""
    library._own(cache)
    if cache.traced():
        raise UnsupportedError("cascade: not under torch.compile; call it outside, or decode whole tables")
    if library.spec.cache.raw is not None:
        raise UnsupportedError(
            "cache.keep_first, keep_last, or a scale that tokens share: which tokens of a prefix are codes "
            "follows from the length of the whole request; decode over whole page tables"
        )
    rope = library.spec.attention.rope
    if rope is not None and rope.stored == "pre":
        raise UnsupportedError(
            'attention.rope.stored = "pre": the keys after a shared prefix would be rotated as if they stood '
            'first; use stored = "post", or decode over whole page tables'
        )


def _check(
    library: CacheOps,
    q: Tensor,
    cache: Cache,
    prefix_table: Tensor,
    prefix_len: int | Tensor,
    table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor | None,
) -> tuple[int, int]:
    """Check what the two passes do not; returns the rows of q and the bytes of their states."""
    import torch

    att = library.spec.attention
    check.need("q", q, (torch_dtype(att.q_dtype),), ("T", att.q_heads, att.head_dim), cache.device)
    check.need("prefix_table", prefix_table, (torch.int32,), ("P",), cache.device)
    known: int | Tensor | None = prefix_len
    if hasattr(prefix_len, "data_ptr"):
        check.need("prefix_len", prefix_len, (torch.int32,), (1,), cache.device)
        known = int(prefix_len) if library._checks_values(cache) else None
    page = library.spec.cache.page_size
    if known is not None or not hasattr(prefix_len, "data_ptr"):
        capacity = prefix_table.shape[0] * page
        hint = f"give 0 to {capacity}, what prefix_table's pages hold, or a (1,) int32 tensor"
        known = check.need_integer("prefix_len", known, 0, capacity, hint)
    if library._checks_values(cache):
        assert known is not None
        _check_pages(prefix_table.numpy()[: -(-known // page)], cache.num_pages)
        if att.causal and q_starts is not None:
            library._check_table(cache, table, kv_lens, q_starts, total=q.shape[0], ranged=False)
            _check_within(np.diff(q_starts.numpy()), kv_lens.numpy())
    return q.shape[0], _sizes(library, q.shape[0])[-1]


def _check_pages(ids: np.ndarray, num_pages: int) -> None:
    wrong = (ids < 0) | (ids >= num_pages)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ArgumentError(f"prefix_table[{at}] = {ids[at]}: the pool has pages 0 to {num_pages - 1}")


def _check_within(q_lens: np.ndarray, kv_lens: np.ndarray) -> None:
    """No query may stand within the prefix, where it would see keys that follow it."""
    early = q_lens - 1 > kv_lens
    if early.any():
        at = int(np.argmax(early))
        raise ArgumentError(
            f"kv_lens[{at}] = {kv_lens[at]}: request {at} has {q_lens[at]} queries, and all but one must "
            "follow the prefix; shorten prefix_len"
        )


def _prefix(
    library: CacheOps,
    q: Tensor,
    cache: Cache,
    shared: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    scale: float | None,
    params: Mapping[str, Tensor] | None,
    workspace: Tensor | None,
    num_threads: int | None,
) -> None:
    """The pass of all queries over the shared prefix, as one request that is not causal."""
    table, lens, starts = shared
    own = library._parts(params, True, q)
    tensors = (q, starts, table, lens, out, lse)
    calls = cache.calls if own is None else None
    # Under a name of its own: decode may see tensors of the same shapes.
    if calls and calls.attend(library, "prefix", tensors, workspace, scale, num_threads):
        return
    values = library._attention(q, cache, table, lens, starts, scale, own, num_threads)
    op = _op_of_prefix(library, cache, q.shape[0], num_threads)
    library._run(op, "prefix", cache, values, out, lse, workspace)
    if calls:
        kernel = library.kernel(op, "prefix")
        library._remember("prefix", kernel, calls, tensors, tensors, values, scale)


def _op_of_prefix(library: CacheOps, cache: Cache, rows: int, num_threads: int | None) -> str:
    """The op whose kernel attends to the prefix.

    Prefill's multiplies faster where many queries share the keys, unless decode multiplies bytes; decode's
    cuts them into splits, which a GPU needs for its units, and a CPU with fewer heads than threads.
    """
    att, threads = library.spec.attention, machine.num_threads(num_threads)
    many = rows > DECODE_ROWS and att.kv_heads >= threads and att.qk == "exact"
    return "prefill" if cache.device.type == "cpu" and many else "decode"


def _sizes(library: CacheOps, rows: int) -> tuple[int, int, int]:
    """Where the partial lse, the integers and the passes' own workspace start, in bytes."""
    att = library.spec.attention
    width = torch_dtype(att.q_dtype).itemsize

    def aligned(nbytes: int) -> int:
        return -(-nbytes // ALIGN) * ALIGN

    outs = aligned(2 * rows * att.q_heads * att.v_head_dim * width)
    lses = outs + aligned(2 * rows * att.q_heads * 4)
    return outs, lses, lses + ALIGN


def _carve(library: CacheOps, workspace: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a workspace: both states' out and lse, the prefix pass's row starts, and its length."""
    import torch

    att = library.spec.attention
    flat = workspace.view(-1).view(_bytes())
    at_lses, at_ints, _ = _sizes(library, rows)
    dtype = torch_dtype(att.q_dtype)
    heads = 2 * rows * att.q_heads
    outs = flat[: heads * att.v_head_dim * dtype.itemsize].view(dtype)
    lses = flat[at_lses : at_lses + heads * 4].view(torch.float32)
    ints = flat[at_ints : at_ints + 12].view(torch.int32)
    states = outs.view(2, rows, att.q_heads, att.v_head_dim), lses.view(2, rows, att.q_heads)
    return *states, ints[:2], ints[2:]


def _bytes() -> Any:
    import torch

    return torch.uint8
