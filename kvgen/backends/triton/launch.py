"""launch: the values of one call -> grids and arguments of the kernels of a module, checked.

Grids depend on shapes only, never on lengths, so a call can be captured in a CUDA graph. Everything
checked here is known without looking into device memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.backends.triton.memory import is_tensor
from kvgen.errors import ArgumentError
from kvgen.ir.plan import KernelPlan
from kvgen.passes.plan_triton_parts import LONGEST, Entry

Values = Mapping[str, Any]
"""ABI names (``kvgen.passes.abi``) to torch tensors, integers, floats or None."""


@dataclass(frozen=True)
class Launch:
    """One kernel to run."""

    entry: Entry
    grid: tuple[int, ...]
    extra: Mapping[str, Any]
    """Parameters that the ABI does not have, and values of the ABI that this launch takes a part of."""


AXIS = (2**31 - 1, 65535, 65535)
"""Most blocks along each axis of a grid."""

MOST_REQUESTS = 32768
"""Requests of one launch where they are counted along the last axis; a larger batch is several launches."""

PER_REQUEST = {"page_table": 0, "kv_lens": 0, "kv_starts": 0, "q_starts": 1}
"""Values with an entry for each request, and how many more they have."""


def launches(plan: KernelPlan, values: Values) -> tuple[Launch, ...]:
    """The kernels of one call in order; none where there is nothing to do.

    Raises ArgumentError for a missing value, a stride or address that breaks a promise, or a size that
    32-bit positions cannot count.
    """
    _check_promises(plan, values)
    _check_widths(plan, values)
    found = tuple(launch for launch in _GRIDS[plan.op](plan, values) if 0 not in launch.grid)
    for launch in found:
        _check_grid(plan, values, launch.grid)
    return found


def workspace_bytes(plan: KernelPlan, values: Values) -> int:
    """Bytes of scratch: one f32 state per query row, head and split for decode, none for other ops."""
    if plan.op != "decode":
        return 0
    rows = int(values["q"].shape[0])
    return rows * plan.spec.attention.q_heads * num_splits(plan, values) * int(plan.constant("SPLIT_ROW")) * 4


def num_splits(plan: KernelPlan, values: Values) -> int:
    """Splits of the grid: they cover the table's whole width, whatever the lengths."""
    capacity = _int(values, "table_width") * plan.spec.cache.page_size
    return max(1, -(-capacity // int(plan.constant("SPLIT_TOKENS"))))


def arguments(launch: Launch, values: Values) -> dict[str, Any]:
    """The run-time arguments of one kernel by parameter name."""
    found: dict[str, Any] = {}
    for param in launch.entry.params:
        if param.name in launch.extra:
            found[param.name] = launch.extra[param.name]
            continue
        if param.value not in values:
            raise ArgumentError(f"{param.value} is missing: {launch.entry.name} needs it ({param.doc})")
        value = launch.extra.get(param.value, values[param.value])
        if param.kind.startswith("*"):
            if not is_tensor(value):
                raise ArgumentError(
                    f"{param.value} = {value!r}: {launch.entry.name} needs a tensor ({param.doc})"
                )
            found[param.name] = value
        else:
            found[param.name] = float(value) if param.kind == "fp32" else int(value)
    return found


def address(tensor: Any) -> int:
    """Where the first element of a torch tensor or numpy array lies."""
    return int(tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data)


def _decode(plan: KernelPlan, values: Values) -> tuple[Launch, ...]:
    att, answers = plan.spec.attention, plan.answers
    splits, batch = num_splits(plan, values), _int(values, "batch")
    longest = _int(values, "max_q_len") if answers["ragged"] else 1
    _check_attention(plan, values)
    _check_workspace(values, workspace_bytes(plan, values))
    split, merge = answers["kernels"]
    tiles = _cdiv(longest * att.group, answers["rows"])
    merge_tiles = _cdiv(longest * att.q_heads, int(plan.constant("MERGE_ROWS")))
    return (
        Launch(split, (batch, att.kv_heads * tiles, splits), {}),
        Launch(merge, (batch, merge_tiles), {"num_splits": splits}),
    )


def _prefill(plan: KernelPlan, values: Values) -> tuple[Launch, ...]:
    att, answers = plan.spec.attention, plan.answers
    _check_attention(plan, values)
    tiles = _cdiv(_int(values, "max_q_len") * att.group, answers["rows"])
    return _by_requests(plan, values, tiles)


def _by_requests(plan: KernelPlan, values: Values, tiles: int) -> tuple[Launch, ...]:
    """Launches over (tile, KV head, request): one, or several that share a batch too large for an axis."""
    batch, heads = _int(values, "batch"), plan.spec.attention.kv_heads
    found = []
    for first in range(0, batch, MOST_REQUESTS):
        count = min(MOST_REQUESTS, batch - first)
        own = {} if count == batch else _requests(plan, values, first, count)
        found.append(Launch(plan.answers["kernels"][0], (tiles, heads, count), own))
    return tuple(found)


def _requests(plan: KernelPlan, values: Values, first: int, count: int) -> dict[str, Any]:
    """What ``values`` have for some requests: views. Rows of q and of outputs are counted through a call."""
    own = {
        name: values[name][first : first + count + more]
        for name, more in PER_REQUEST.items()
        if values.get(name) is not None
    }
    for param in plan.spec.attention.params:
        tensor: Any = values.get(f"param_{param.name}")
        if "batch" in param.dims and tensor is not None:
            index = [slice(None)] * param.dims.index("batch")
            own[f"param_{param.name}"] = tensor[(*index, slice(first, first + count))]
    return own


def _append(plan: KernelPlan, values: Values) -> tuple[Launch, ...]:
    if (raw := plan.spec.cache.raw) is not None:
        # The tokens of a request from the first that is raw before the call to its end.
        tokens = raw.keep_last + raw.block - 1 + _int(values, "max_new_len")
        tiles = _cdiv(tokens, int(plan.constant("SPAN"))) if _int(values, "max_new_len") else 0
        return _by_requests(plan, values, tiles)
    rows = _rows(_int(values, "num_tokens"), plan.spec.attention.kv_heads, "KV heads")
    return (Launch(plan.answers["kernels"][0], (_cdiv(rows, int(plan.constant("ROWS"))),), {}),)


def _merge(plan: KernelPlan, values: Values) -> tuple[Launch, ...]:
    rows = _rows(_int(values, "num_tokens"), plan.spec.attention.q_heads, "query heads")
    return (Launch(plan.answers["kernels"][0], (_cdiv(rows, int(plan.constant("ROWS"))),), {}),)


def _copy(plan: KernelPlan, values: Values) -> tuple[Launch, ...]:
    chunks = _cdiv(plan.answers["largest"], int(plan.constant("BLOCK")))
    return (Launch(plan.answers["kernels"][0], (_int(values, "num_pairs"), chunks), {}),)


def _gather(plan: KernelPlan, values: Values) -> tuple[Launch, ...]:
    tiles = _cdiv(_int(values, "max_kv_len"), int(plan.constant("TILE")))
    return _by_requests(plan, values, tiles)


_GRIDS = {
    "decode": _decode,
    "prefill": _prefill,
    "append": _append,
    "merge": _merge,
    "copy": _copy,
    "gather": _gather,
}


def _check_promises(plan: KernelPlan, values: Values) -> None:
    """What the compiled code rests on: 16-byte addresses and strides that keep rows on them."""
    named = {arg.name: arg for arg in plan.args}
    for name in sorted(plan.answers["aligned"] & set(named)):
        value: Any = values.get(name)
        if named[name].kind == "ptr" and is_tensor(value):
            if address(value) % 16:
                raise ArgumentError(
                    f"{name}: its first element lies at {address(value):#x}, no multiple of 16 bytes"
                )
        elif isinstance(value, int) and value % 16:
            raise ArgumentError(
                f"{name} = {value}: kernels of this layout load 16 elements "
                "at a step, so the stride must be a multiple of 16"
            )


def _check_widths(plan: KernelPlan, values: Values) -> None:
    """Page strides that the kernels take in 32 bits."""
    narrow = {p.value for entry in plan.answers["kernels"] for p in entry.params if p.kind == "i32"}
    for name in sorted(n for n in narrow if n.endswith("_stride_page")):
        if (value := _int(values, name)) >= 2**31:
            raise ArgumentError(f"{name} = {value}: a page of 2**31 elements or more is not supported")


_COUNTED = {
    ("decode", 1): ("max_q_len", "split the call, or use prefill"),
    ("decode", 2): ("table_width", "give a narrower table, or pin a larger decode.split_tokens"),
}
"""What an axis of an op's grid grows with, and what helps, where a call can make it too long."""


def _check_grid(plan: KernelPlan, values: Values, grid: tuple[int, ...]) -> None:
    for axis, (count, most) in enumerate(zip(grid, AXIS, strict=False)):
        if count > most:
            name, hint = _COUNTED.get((plan.op, axis), ("batch", "split the call"))
            raise ArgumentError(
                f"{name} = {values.get(name)}: {plan.op} would need {count} blocks along an axis with "
                f"room for {most}; {hint}"
            )


def _check_attention(plan: KernelPlan, values: Values) -> None:
    scale = values.get("score_scale")
    if not isinstance(scale, int | float) or not scale > 0:
        raise ArgumentError(
            f"score_scale = {scale!r}: must be positive, because the maximum is taken before it is applied"
        )
    capacity = _int(values, "table_width") * plan.spec.cache.page_size
    if capacity > LONGEST:
        raise ArgumentError(
            f"table_width = {values['table_width']} pages of {plan.spec.cache.page_size} hold "
            f"{capacity} tokens; positions are counted in 32 bits, so at most {LONGEST} are possible"
        )


def _check_workspace(values: Values, need: int) -> None:
    given: Any = values.get("workspace")
    have = int(given.nbytes) if is_tensor(given) else 0
    if have < need:
        raise ArgumentError(f"workspace: {have} bytes given, {need} needed (see the workspace query)")
    if address(given) % 16:
        raise ArgumentError(f"workspace: lies at {address(given):#x}, which is not a multiple of 16 bytes")


def _rows(tokens: int, heads: int, what: str) -> int:
    if tokens * heads >= 2**31:
        raise ArgumentError(f"num_tokens = {tokens}: rows of {heads} {what} exceed 2**31; split the call")
    return tokens * heads


def _int(values: Values, name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(f"{name} = {value!r}: must be an integer of at least 0")
    return value


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
