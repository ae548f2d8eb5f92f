"""quick: appends and attention calls on the CPU whose shapes were seen before.

The first call of a shape goes through every check of ``arguments`` and leaves a ``Known``: the kernel's
arguments, packed, but for addresses. The next one compares what those checks look at (types, shapes and
strides: one call of a guard of torch's where the last call was alike, else a key), fills in addresses, and
asks the kernel itself to look at lengths and page ids. That takes a tenth of the time. Whatever is unusual (a
subclass, another device, a lazily negated view, outputs that may overlap, a value out of range) is left to
the long way, which words the errors.

Storage that somebody cut short behind a tensor's back is noticed here too, at 0.15 us a tensor. Torch's own
operators do not look at all.

The code is flat on purpose: each attribute of a tensor costs 50 to 100 ns, and so does each Python call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvgen.backends.cpu import machine
from kvgen.runtime.alike import guard
from kvgen.runtime.places import reach, spans

NUMBERS = ("q", "q_starts", "page_table", "kv_lens", "out", "lse", "workspace", "max_q_len")
"""What every call brings anew: addresses, and a number that follows from values."""

APPENDED = ("k_new", "v_new", "slots", *[""] * 5)
"""The same for append, filled up to the eight numbers that a struct is bound with."""

LOW = 1 << 36
"""Below this an address is looked at twice: a view of freed storage shows its offset, as if it began at 0."""

CPU = torch.device("cpu")
"""Said wherever a tensor is made, as its type is: torch's defaults may have changed since the last call."""

LIMIT = 256
"""Most shapes remembered by one cache; a server's batches come in no more than a few dozen."""


class Call(Protocol):
    """A kernel's arguments but for ``NUMBERS``."""

    at: tuple[int, ...]
    """Where in the struct of ``bind`` each number goes."""

    def bind(self, numbers: Any) -> Any: ...

    query: Any
    """(struct, num_pages or -1, rows) -> bytes of workspace, or minus the rule that values break."""

    def launch(self, args: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Known:
    """A call of known shapes."""

    call: Call
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    reaches: tuple[int, ...]
    """Bytes from the first to past the last element of q, q_starts, page_table, kv_lens, out, lse."""
    itemsize: int
    """Bytes of an element of q and out, or of k and v: a power of two that divides their addresses."""
    scale: float | None
    """The scale that was given."""
    threads: int
    alike: Callable[..., bool]
    """Whether tensors have the types, shapes and strides of those that were given, in the same order."""


class Calls:
    """The calls that one cache has seen."""

    def __init__(self, num_pages: int, fields: Mapping[str, Tensor]) -> None:
        self._num_pages = num_pages
        self._known: dict[Hashable, Known] = {}
        self._last: dict[Hashable, Known] = {}
        """The latest call of each library and op, by which tensors were given: the next is mostly alike."""
        self._fields = fields
        self._look()

    def _look(self) -> None:
        """Note where the cache's memory is."""
        self._planes = tuple((tensor, tensor.data_ptr()) for tensor in self._fields.values())
        self._spans = spans(self._fields)

    def put(
        self,
        key: Hashable,
        call: Call,
        made: tuple[Tensor | None, ...],
        given: tuple[Tensor | None, ...],
        scale: float | None,
        threads: int,
    ) -> None:
        """Remember a call that was checked; all are forgotten when there are too many.

        ``given``: q, q_starts, page_table, kv_lens, out, lse as given, ``made``: with out and lse as
        they were made; or those of an append.
        """
        if len(self._known) >= LIMIT:
            self._forget()
        if any(plane.data_ptr() != address for plane, address in self._planes):
            self._forget()
            self._look()
        out, lse = (() if tensor is None else tuple(tensor.shape) for tensor in made[-2:])
        reaches = tuple(reach(tensor) for tensor in made)
        assert made[0] is not None  # q or k
        self._known[key] = Known(
            call,
            out,
            lse,
            reaches,
            made[0].itemsize,
            scale,
            threads,
            guard([t for t in given if t is not None]),
        )

    def _forget(self) -> None:
        self._known.clear()
        self._last.clear()

    def append(self, library: Any, k: Tensor, v: Tensor, slots: Tensor) -> bool:
        """Run an append of known shapes; whether that was done."""
        threads = machine.num_threads()
        kind = library.serial, "append"
        known = self._last.get(kind)
        if (
            known is None
            or known.threads != threads
            or not known.alike(*[t if type(t) is Tensor and not t.is_nested else None for t in (k, v, slots)])
        ):
            key = call_key(library.serial, "append", (k, v, slots), None, threads)
            known = self._known.get((key, ()))
            if known is None or key is None:
                return False
            self._last[kind] = known
        try:
            at_k, at_v, at_slots = k.data_ptr(), v.data_ptr(), slots.data_ptr()
        except RuntimeError:  # a tensor of a transform has no address
            return False
        if (at_k < LOW or at_v < LOW or at_slots < LOW) and not in_memory((k, v, slots)):
            return False
        if (at_k | at_v) & (known.itemsize - 1) or at_slots & 7:
            return False
        size_k, size_v, size_slots = known.reaches
        if (
            k.untyped_storage().nbytes() - k.storage_offset() * known.itemsize < size_k
            or v.untyped_storage().nbytes() - v.storage_offset() * known.itemsize < size_v
            or slots.untyped_storage().nbytes() - slots.storage_offset() * 8 < size_slots
        ):
            return False
        for first, end in self._spans:
            if (
                (first < at_k + size_k and at_k < end)
                or (first < at_v + size_v and at_v < end)
                or (first < at_slots + size_slots and at_slots < end)
            ):
                return False
        for plane, address in self._planes:
            if plane.data_ptr() != address:
                return False
        args = known.call.bind((at_k, at_v, at_slots, 0, 0, 0, 0, 0))
        if library.checked and known.call.query(args, self._num_pages, 0) < 0:
            return False
        known.call.launch(args)
        return True

    def attend(
        self,
        library: Any,
        op: str,
        tensors: tuple[Tensor | None, ...],
        workspace: Tensor | None,
        scale: Any,
        num_threads: int | None,
        extra: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor] | None:
        """Run a call of known shapes; None where the long way must be taken.

        ``extra``: its parameters, the second and third of each being its first byte and its end.
        """
        threads = machine.num_threads(num_threads)
        q, q_starts, table, kv_lens, out, lse = tensors
        if q is None or table is None or kv_lens is None:
            return None
        kind = library.serial, op, q_starts is None, out is None, lse is None, extra
        known = self._last.get(kind)
        if (
            known is None
            or known.threads != threads
            or (scale is not known.scale and (type(scale) is not float or scale != known.scale))
            or not known.alike(
                *[t if type(t) is Tensor and not t.is_nested else None for t in tensors if t is not None]
            )
        ):
            key = call_key(library.serial, op, tensors, scale, threads)
            known = self._known.get((key, extra))
            if known is None or key is None:
                return None
            self._last[kind] = known
        try:
            at_q, at_table, at_lens = q.data_ptr(), table.data_ptr(), kv_lens.data_ptr()
            at_starts = 0 if q_starts is None else q_starts.data_ptr()
            size_q, size_starts, size_table, size_lens, size_out, size_lse = known.reaches
            if (
                q.untyped_storage().nbytes() - q.storage_offset() * known.itemsize < size_q
                or table.untyped_storage().nbytes() - table.storage_offset() * 4 < size_table
                or kv_lens.untyped_storage().nbytes() - kv_lens.storage_offset() * 4 < size_lens
            ):
                return None
            if q_starts is not None and (
                q_starts.untyped_storage().nbytes() - q_starts.storage_offset() * 4 < size_starts
            ):
                return None
            if out is None:
                out = torch.empty(known.out_shape, dtype=q.dtype, device=CPU)
                at_out = out.data_ptr()
            else:
                at_out = out.data_ptr()
                room = out.untyped_storage().nbytes() - out.storage_offset() * known.itemsize
                if room < size_out or not (
                    (at_out + size_out <= at_q or at_q + size_q <= at_out)
                    and (at_out + size_out <= at_table or at_table + size_table <= at_out)
                    and (at_out + size_out <= at_lens or at_lens + size_lens <= at_out)
                    and (at_out + size_out <= at_starts or at_starts + size_starts <= at_out)
                ):
                    return None
            if lse is None:
                lse = torch.empty(known.lse_shape, dtype=torch.float32, device=CPU)
                at_lse = lse.data_ptr()
            else:
                at_lse = lse.data_ptr()
                room = lse.untyped_storage().nbytes() - 4 * lse.storage_offset()
                if room < size_lse or not (
                    (at_lse + size_lse <= at_q or at_q + size_q <= at_lse)
                    and (at_lse + size_lse <= at_table or at_table + size_table <= at_lse)
                    and (at_lse + size_lse <= at_lens or at_lens + size_lens <= at_lse)
                    and (at_lse + size_lse <= at_starts or at_starts + size_starts <= at_lse)
                    and (at_lse + size_lse <= at_out or at_out + size_out <= at_lse)
                ):
                    return None
        except RuntimeError:  # a tensor of a transform has no address
            return None
        low = at_q < LOW or at_table < LOW or at_lens < LOW or at_out < LOW or at_lse < LOW
        if (low or (q_starts is not None and at_starts < LOW)) and not in_memory((*tensors, out, lse)):
            return None
        if (at_q | at_out) & (known.itemsize - 1) or (at_starts | at_table | at_lens | at_lse) & 3:
            return None
        for first, end in self._spans:
            if (first < at_out + size_out and at_out < end) or (first < at_lse + size_lse and at_lse < end):
                return None
        for _, first, end, *_ in extra:
            if (first < at_out + size_out and at_out < end) or (first < at_lse + size_lse and at_lse < end):
                return None
        for plane, address in self._planes:
            if plane.data_ptr() != address:  # its storage was moved, into shared memory for example
                return None
        longest = 1 if q_starts is None else int(np.diff(q_starts.numpy()).max(initial=0))
        call = known.call
        args = call.bind((at_q, at_starts, at_table, at_lens, at_out, at_lse, 0, longest))
        need = call.query(args, self._num_pages if library.checked else -1, known.out_shape[0])
        if need < 0:
            return None
        if workspace is None:
            at_workspace = library.scratch(need, CPU).data_ptr()
            if not at_workspace:  # a mode of torch's made a tensor without memory
                return None
        else:
            at_workspace = self._workspace(workspace, need)
            end = at_workspace + need
            if any(first < end and at_workspace < last for _, first, last, *_ in extra):
                return None
            if not at_workspace or not (
                (end <= at_out or at_out + size_out <= at_workspace)
                and (end <= at_lse or at_lse + size_lse <= at_workspace)
                and (end <= at_q or at_q + size_q <= at_workspace)
                and (end <= at_table or at_table + size_table <= at_workspace)
                and (end <= at_lens or at_lens + size_lens <= at_workspace)
                and (end <= at_starts or at_starts + size_starts <= at_workspace)
            ):
                return None
        args[call.at[6]] = at_workspace
        call.launch(args)
        return out, lse

    def _workspace(self, workspace: Any, need: int) -> int:
        """The address of a workspace that is plain, large enough and outside the cache; otherwise 0."""
        if type(workspace) is not Tensor or not workspace.is_cpu:
            return 0
        try:
            if not workspace.is_contiguous():
                return 0
            at = workspace.data_ptr()
            room = workspace.untyped_storage().nbytes() - workspace.storage_offset() * workspace.itemsize
        except RuntimeError:  # of a transform, or sparse
            return 0
        if min(room, workspace.nbytes) < need or at % 16:
            return 0
        for first, end in self._spans:
            if first < at + need and at < end:
                return 0
        return int(at)


def in_memory(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether all tensors have elements, in storage that was not freed."""
    return all(t is None or t.data_ptr() not in (0, t.storage_offset() * t.itemsize) for t in tensors)


def call_key(
    library: int, op: str, tensors: tuple[Tensor | None, ...], scale: Any, threads: int
) -> Hashable | None:
    """What the checks of a call look at; None where only they can say.

    ``library``: a number that is the library's own. ``tensors``: q, q_starts, page_table, kv_lens, out, lse.
    """
    if scale is not None and type(scale) is not float:
        return None
    parts: list[Any] = [library, op, scale, threads]
    try:
        for tensor in tensors:
            if tensor is None:
                parts.append(None)
            # Whether a gradient is asked for depends on torch's mode too.
            elif type(tensor) is not Tensor or not tensor.is_cpu or tensor.is_neg() or tensor.requires_grad:
                return None
            else:
                parts += (tensor.dtype, tensor.shape, tensor.stride())
    except RuntimeError:  # a sparse tensor has no strides
        return None
    return tuple(parts)
