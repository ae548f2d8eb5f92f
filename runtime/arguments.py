"""Checks of what a caller hands to an op. Every message names the argument, what it is and what would work.

Shapes, types, devices and strides are always checked. Values (lengths, page ids, slots) only in checked
mode on the CPU: on a GPU that would need a synchronisation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvgen.errors import ArgumentError, brief
from kvgen.runtime.places import need_memory, need_tensor

INT64 = 2**63 - 1


def need(
    name: str,
    tensor: Any,
    dtypes: tuple[Any, ...],
    shape: tuple[int | str, ...],
    device: Any,
    *,
    last_contiguous: bool = True,
) -> None:
    """Refuse ``tensor`` unless it has one of ``dtypes``, this shape (names are free sizes) and device."""
    need_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        cast = {"int32": ".int()", "int64": ".long()"}.get(names, f".to(torch.{names.split(' or ')[0]})")
        raise ArgumentError(
            f"{name}: dtype {str(tensor.dtype).removeprefix('torch.')}, not {names}; use {cast}"
        )
    if tensor.dim() != len(shape) or any(
        not isinstance(want, str) and size != want for size, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join(map(str, shape))
        raise ArgumentError(f"{name}: shape {tuple(tensor.shape)}, not ({wanted})")
    if tensor.device != device:
        raise ArgumentError(
            f"{name}: on {tensor.device}, but the cache is on {device}; use .to({str(device)!r})"
        )
    # What has no elements may come with any strides: numpy gives it zeros.
    if (
        last_contiguous
        and tensor.dim()
        and tensor.shape[-1] > 1
        and tensor.stride(-1) != 1
        and tensor.numel()
    ):
        raise ArgumentError(
            f"{name}: last dimension has stride {tensor.stride(-1)}, not 1; use .contiguous()"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentError(f"{name}: a lazily negated view, whose memory differs; use .resolve_neg()")
    if tensor.requires_grad:
        import torch

        if torch.is_grad_enabled():
            raise ArgumentError(
                f"{name}: requires a gradient, and these kernels have none; use {name}.detach(), or call "
                "under torch.no_grad()"
            )
    need_memory(name, tensor)


def need_table(table: Any, device: Any) -> None:
    """Refuse a page table without a row for each request."""
    need_tensor("page_table", table)
    if table.dim() == 1:
        raise ArgumentError(
            f"page_table: shape {tuple(table.shape)}, not (B, P), a row for each request; "
            "for one request use page_table[None]"
        )
    import torch

    need("page_table", table, (torch.int32,), ("B", "P"), device)


def batch_of(table: Any, kv_lens: Any, name: str, last: Any) -> int:
    """Requests of a call, as most of its arguments have it: so that the odd one out is blamed.

    ``last``, called ``name``: q of one row a request, or q_starts, which has one more.
    """
    counts = [int(table.shape[0])]
    for each, tensor, more in (("kv_lens", kv_lens, 0), (name, last, int(name == "q_starts"))):
        need_tensor(each, tensor)
        counts += [int(tensor.shape[0]) - more] if tensor.dim() else []
    return max(counts, key=counts.count)


def need_integer(name: str, value: Any, low: int, high: int, hint: str) -> int:
    """``value`` as an int from ``low`` to ``high``; numpy's integers are integers, truth values are not."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ArgumentError(f"{name} = {brief(value)}: {hint}")
    return int(value)


def need_bool(name: str, value: Any) -> None:
    """Refuse what is no truth value: of a tensor or an array Python could not say which it is."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} = {brief(value)}: give True or False")


def need_real(name: str, value: Any, low: float, high: float, hint: str) -> float:
    """``value`` as a float above ``low``, up to ``high``."""
    number = value.item() if isinstance(value, np.integer | np.floating) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not low < number <= high:
        raise ArgumentError(f"{name} = {brief(value)}: {hint}")
    return float(number)


def need_integers(name: str, values: Any, hint: str) -> list[int]:
    """Integers, or tensors of one each, or one tensor or array of them, as a list."""
    try:
        found = list(_plain(name, values))
    except TypeError:
        raise ArgumentError(f"{name} = {brief(values)}: {hint}") from None
    named = [(f"{name}[{at}]", value) for at, value in enumerate(found)]
    return [need_integer(each, _plain(each, value), -INT64 - 1, INT64, hint) for each, value in named]


def _plain(name: str, value: Any) -> Any:
    """A tensor's or an array's values, or ``value`` as it is."""
    if hasattr(value, "data_ptr"):
        need_tensor(name, value)
        need_memory(name, value)
    return value.tolist() if hasattr(value, "tolist") else value


def need_scale(scale: Any, default: float) -> float:
    """``scale`` as a float; refused where it is no positive number that f32 can hold."""
    try:
        if hasattr(scale, "data_ptr"):
            need_tensor("scale", scale)
            need_memory("scale", scale)
        value = math.nan if isinstance(scale, bool | str | bytes) else float(scale)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several values
        value = math.nan
    if 2.0**-126 <= value < 2.0**127:
        return value
    raise ArgumentError(
        f"scale = {brief(scale)}: give a positive finite number of the f32 range, or None for {default}"
    )


def need_pair(name: str, pair: Any) -> None:
    """Refuse anything but two tensors with rows."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ArgumentError(f"{name} = {brief(pair)}: give a pair of tensors (k, v)")
    for at, tensor in enumerate(pair):
        need_tensor(f"{name}[{at}]", tensor)
        if not tensor.dim():
            raise ArgumentError(f"{name}[{at}] = {brief(tensor)}: give a torch tensor (T, kv_heads, width)")


def need_starts(q_starts: Any) -> None:
    """Refuse a prefill that does not say which rows of q belong to which request."""
    if q_starts is None:
        raise ArgumentError("q_starts = None: prefill needs the first row of each request, (B + 1,) int32")


def need_default(**options: Any) -> None:
    """Refuse options that the ops of ``torch.compile`` do not take."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(
                f"{name}: not under torch.compile, which allocates outputs itself; leave it out"
            )


def need_workspace(workspace: Any, nbytes: int, device: Any) -> None:
    """Refuse a workspace that is too small, elsewhere, scattered, or off the boundaries kernels rely on."""
    need_tensor("workspace", workspace)
    if workspace.nbytes < nbytes:
        raise ArgumentError(
            f"workspace: {workspace.nbytes} bytes, but this call needs {nbytes}; see workspace_bytes()"
        )
    if workspace.device != device:
        raise ArgumentError(f"workspace: on {workspace.device}, but the cache is on {device}")
    if not workspace.is_contiguous():
        raise ArgumentError("workspace: not contiguous; give for example torch.empty(n, dtype=torch.uint8)")
    need_memory("workspace", workspace)
    if workspace.data_ptr() % 16:
        raise ArgumentError("workspace: starts at an address that is no multiple of 16 bytes")


def empty(name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """A new tensor for an output that the caller did not give; refused where there is no room for it."""
    import torch

    try:
        made = torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError):
        raise ArgumentError(f"{name}: no memory for shape {shape}; give fewer rows at a time") from None
    if type(made) is not torch.Tensor:
        kind = type(made).__name__
        raise ArgumentError(
            f"{name}: torch makes a {kind} here, which has no memory; leave its mode for the call"
        )
    return made


def check_lens(kv_lens: Any, table: Any, page_size: int) -> None:
    """Lengths must lie between 0 and what a row of the page table can hold."""
    lens = kv_lens.numpy()
    capacity = table.shape[1] * page_size
    if lens.size and (int(lens.min()) < 0 or int(lens.max()) > capacity):
        at = int(np.argmax((lens < 0) | (lens > capacity)))
        reason = f"a row of {table.shape[1]} pages of {page_size} tokens holds 0 to {capacity}"
        raise ArgumentError(f"kv_lens[{at}] = {lens[at]}: {reason}; widen page_table or shorten the request")


def check_pages(table: Any, first_page_B: Any, end_page_B: Any, num_pages: int) -> None:
    """Every page id that the op will read must name a page of the pool; other entries may hold anything."""
    ids = table.numpy()
    column = np.arange(ids.shape[1])
    used = (column >= first_page_B[:, None]) & (column < end_page_B[:, None])
    wrong = used & ((ids < 0) | (ids >= num_pages))
    if wrong.any():
        b, p = (int(i) for i in np.argwhere(wrong)[0])
        raise ArgumentError(f"page_table[{b}, {p}] = {ids[b, p]}: the pool has pages 0 to {num_pages - 1}")


def check_positions(positions: Any, slots: Any, rows: int) -> None:
    """Positions of tokens that are stored must be rows of the table of angles."""
    values = positions.numpy()
    wrong = ((values < 0) | (values >= rows)) & (slots.numpy() != -1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ArgumentError(
            f"positions[{at}] = {values[at]}: the table of angles has positions 0 to {rows - 1}"
        )


def check_slots(slots: Any, capacity: int) -> None:
    """Slots must be -1 or lie in the pool, and none may come twice in one append."""
    values = slots.numpy()
    if not values.size:
        return
    wrong = (values < -1) | (values >= capacity)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ArgumentError(f"slots[{at}] = {values[at]}: give -1 (skip) or 0 to {capacity - 1}")
    real = np.sort(values[values >= 0])
    twice = real[1:][real[1:] == real[:-1]]
    if twice.size:
        at = np.flatnonzero(values == twice[0])[:2].tolist()
        raise ArgumentError(
            f"slots[{at[0]}] and slots[{at[1]}] = {twice[0]}: the same slot twice in one append"
        )


def check_starts(name: str, starts: Any, total: int, rows: str = "q") -> None:
    """Row starts must begin at 0, never fall, and end at the number of rows of ``rows``."""
    values = starts.numpy()
    # Compared, not subtracted: a difference of two int32 may not fit into one.
    if values[0] != 0 or values[-1] != total or (values[1:] < values[:-1]).any():
        rule = f"must start at 0, never fall and end at the {total} rows of {rows}"
        raise ArgumentError(f"{name} = {values.tolist()[:8]}: {rule}")


def check_copy(src: Any, dst: Any, num_pages: int) -> None:
    """No page may be a destination twice, or both source and destination."""
    for name, pages in (("src_pages", src), ("dst_pages", dst)):
        values = pages.numpy()
        wrong = (values < 0) | (values >= num_pages)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ArgumentError(f"{name}[{at}] = {values[at]}: the pool has pages 0 to {num_pages - 1}")
    targets, counts = np.unique(dst.numpy(), return_counts=True)
    if (counts > 1).any():
        raise ArgumentError(f"dst_pages: page {targets[counts > 1][0]} is a destination twice")
    both = np.intersect1d(src.numpy(), targets)
    if both.size:
        raise ArgumentError(f"src_pages, dst_pages: page {both[0]} is both a source and a destination")
