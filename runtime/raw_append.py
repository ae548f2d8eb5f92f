"""raw_append: append for specs that leave some tokens unquantised: requests say where rows go, not slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.errors import ArgumentError, brief
from kvgen.runtime import arguments as check
from kvgen.runtime import places
from kvgen.runtime.base import Tensor, dtype_name
from kvgen.runtime.cache import Cache
from kvgen.runtime.params import ROPE, bind
from kvgen.runtime.raw_checks import check_append

if TYPE_CHECKING:
    from kvgen.runtime.ops import CacheOps

HINT = "give page_table, kv_lens (new tokens counted) and q_starts (the first new row of each request)"


def append_requests(
    library: CacheOps,
    cache: Cache,
    k: Tensor,
    v: Tensor | None,
    slots: Any,
    positions: Any,
    tables: tuple[Any, Any, Any],
    params: Mapping[str, Tensor] | None,
) -> None:
    """``append`` with ``tables``: page_table, kv_lens, q_starts. Refuses them for a spec that takes slots."""
    names = ("page_table", "kv_lens", "q_starts")
    if library.spec.cache.raw is None:
        name, value = next((n, t) for n, t in zip(names, tables, strict=True) if t is not None)
        reason = "each token of this cache becomes codes at once, in its slot"
        raise ArgumentError(f"{name} = {brief(value)}: {reason}; give slots (T,) int64 and leave {name} out")
    if slots is not None:
        reason = "tokens of this cache become codes together, request by request"
        raise ArgumentError(f"slots = {brief(slots)}: {reason}; {HINT}")
    if positions is not None:
        reason = "in this cache they follow from kv_lens and q_starts"
        raise ArgumentError(f"positions = {brief(positions)}: {reason}; leave positions out")
    if missing := [name for name, value in zip(names, tables, strict=True) if value is None]:
        raise ArgumentError(f"{missing[0]}: missing; {HINT}")
    if isinstance(cache, Cache) and cache.traced():
        turned = ((params or {}).get(ROPE.name),) if library._turns else ()
        given = (k, *(() if library.spec.cache.alias else (v,)), *tables, *turned)
        cache.ops.append(*given, *cache.planes.values())
        return
    library._own(cache)
    rows = library._rows(cache, k, v)
    table, kv_lens, q_starts = tables
    _check_tables(cache, table, kv_lens, q_starts)
    batch, total = table.shape[0], k.shape[0]
    inputs = {"k": k, "page_table": table, "kv_lens": kv_lens, "q_starts": q_starts}
    places.need_outside(inputs | ({} if v is None else {"v": v}), cache.fields())
    bound = bind((ROPE,) if library._turns else (), params, library._rotary, cache.device)
    longest = total
    if cache.device.type == "cpu":
        longest = int(np.diff(q_starts.numpy()).max(initial=0))
    if library._checks_values(cache):
        positions_known = bound["param_rope_table"].shape[0] if library._turns else None
        check_append(cache, table, kv_lens, q_starts, total, positions_known)
    if not total:
        return
    library.kernel("append", dtype_name(k.dtype)).launch(
        {
            **cache.arguments(),
            **rows,
            **bound,
            "q_starts": q_starts,
            "page_table": table,
            "table_stride": table.stride(0),
            "kv_lens": kv_lens,
            "batch": batch,
            "max_new_len": longest,
            "table_width": table.shape[1],
        }
    )


def _check_tables(cache: Cache, table: Any, kv_lens: Any, q_starts: Any) -> None:
    """Types, shapes and devices of the tables."""
    import torch

    check.need_table(table, cache.device)
    batch = check.batch_of(table, kv_lens, "q_starts", q_starts)
    check.need("page_table", table, (torch.int32,), (batch, "P"), cache.device)
    check.need("kv_lens", kv_lens, (torch.int32,), (batch,), cache.device)
    check.need("q_starts", q_starts, (torch.int32,), (batch + 1,), cache.device)
