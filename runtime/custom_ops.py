"""custom_ops: the six ops as ``torch.ops``, opaque to ``torch.compile`` and ``torch.export``.

Each op takes the planes of a cache as tensors. Those it writes are marked as mutated, no other is, and its
fake gives the shapes of what it returns. Registered with ``Library.define`` and ``impl``: a call costs 3 us,
where ``torch.library.custom_op`` takes 15 to 21 (measured with torch 2.13).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvgen.errors import ArgumentError, brief
from kvgen.runtime.cache import RAW_ROWS, Cache, torch_dtype
from kvgen.runtime.given import arguments_of, given_names


class TorchOps:
    """The ops of one library under one namespace of ``torch.ops``."""

    def __init__(self, library: Any, namespace: str = "") -> None:
        """``namespace``: by default ``kvgen_`` and the spec's hash; gets a number where it is taken."""
        self._library = library
        self.namespace = _free(namespace or f"kvgen_{library.spec.hash8}")
        record, spec = library.record, library.spec
        self._stored = tuple(plane.name for plane in record.planes)
        self._given = given_names(spec)
        raw = tuple(plane.name for plane in record.raw)
        self._planes = self._stored + self._given + raw + ((RAW_ROWS,) if raw else ())
        self._defined: Any = torch.library.Library(self.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        read = "".join(f", Tensor {name}" for name in self._planes)
        written = set(self._stored + raw)
        marks = (f"(a{at}!)" if name in written else "" for at, name in enumerate(self._planes))
        write = "".join(f", Tensor{mark} {name}" for mark, name in zip(marks, self._planes, strict=True))
        table = ", Tensor page_table, Tensor kv_lens"
        att = spec.attention
        self._params = tuple(param.name for param in library._wanted)
        params = "".join(f", Tensor {name}" for name in self._params)
        values = "" if spec.cache.alias else ", Tensor v_new"
        # Read here, so that both are plain attributes by the time that a call is traced.
        turning = ", Tensor positions, Tensor rope_table" if library._turns else ""
        sink = ", Tensor sink_logit" if att.sink else ""
        where = "Tensor slots"
        if library._by_request:
            where = "Tensor page_table, Tensor kv_lens, Tensor q_starts"
            turning = turning.replace(", Tensor positions", "")
        self._define("append", f"Tensor k_new{values}, {where}{turning}{write}", "()")
        self._define("decode", f"Tensor q{read}{table}{params}, Tensor? q_starts=None{_OPTIONS}", _PAIR)
        self._define("prefill", f"Tensor q{read}{table}{params}, Tensor q_starts{_OPTIONS}", _PAIR)
        self._define("merge", f"Tensor outs, Tensor lses{sink}", _PAIR)
        self._define("copy", f"Tensor src_pages, Tensor dst_pages{write}", "()")
        self._define("gather", f"Tensor page_table, Tensor kv_lens{read}", _PAIR)
        self.ops = getattr(torch.ops, self.namespace)

    def _define(self, op: str, arguments: str, result: str) -> None:
        self._defined.define(f"{op}({arguments}) -> {result}")
        self._defined.impl(op, getattr(self, op), "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"{self.namespace}::{op}", getattr(self, f"_fake_{op}"), lib=self._defined
        )

    def _cache(self, planes: tuple[Tensor, ...]) -> Cache:
        """The cache of these planes: the one that made them where they come from one."""
        owner = getattr(planes[0], "kvgen_cache", None)
        cache: Cache | None = owner() if owner is not None else None
        mine = () if cache is None else tuple(cache.planes.values())
        if cache and len(mine) == len(planes) and all(a is b for a, b in zip(mine, planes, strict=True)):
            return cache
        named = dict(zip(self._planes, planes, strict=True))
        given = {name: named.pop(name) for name in self._given}
        return self._library.adopt(**arguments_of(given), **named)  # type: ignore[no-any-return]

    def append(self, k: Tensor, *rest: Tensor) -> None:
        planes = len(self._planes)
        given, cache = list(rest[:-planes]), self._cache(rest[-planes:])
        v = None if self._library.spec.cache.alias else given.pop(0)
        params = {"rope_table": given.pop()} if self._library._turns else None
        if self._library._by_request:
            tables = dict(zip(("page_table", "kv_lens", "q_starts"), given, strict=True))
            self._library.append(cache, k, v, **tables, params=params)
        else:
            self._library.append(cache, k, v, *given, params=params)

    def decode(self, q: Tensor, *rest: Any, **options: Any) -> Any:
        return self._attend(self._library.decode, q, rest, options)

    def prefill(self, q: Tensor, *rest: Any, **options: Any) -> Any:
        return self._attend(self._library.prefill, q, rest, options)

    def _attend(self, run: Callable[..., Any], q: Tensor, rest: tuple[Any, ...], options: Any) -> Any:
        count, last = len(self._planes), 2 + len(self._params)
        cache, given = self._cache(rest[:count]), rest[count:]
        params = dict(zip(self._params, given[2:last], strict=True)) or None
        return run(q, cache, *given[:2], *given[last:], params=params, **options)

    def merge(self, outs: Tensor, lses: Tensor, *sink: Tensor) -> tuple[Tensor, Tensor]:
        params = {"sink_logit": sink[0]} if sink else None
        return self._library.merge(outs, lses, params=params)  # type: ignore[no-any-return]

    def copy(self, src: Tensor, dst: Tensor, *planes: Tensor) -> None:
        self._library.copy(self._cache(planes), src, dst)

    def gather(self, table: Tensor, kv_lens: Tensor, *planes: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._library.gather(self._cache(planes), table, kv_lens)
        return k, v.clone() if self._library.spec.cache.alias else v

    def _fake_append(self, *arguments: Tensor) -> None:
        return None

    _fake_copy = _fake_append

    def _fake_decode(self, q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        att = self._library.spec.attention
        rows = q.shape[0]
        return q.new_empty(rows, att.q_heads, att.v_head_dim), q.new_empty(
            rows, att.q_heads, dtype=torch.float32
        )

    _fake_prefill = _fake_decode

    def _fake_merge(self, outs: Tensor, lses: Tensor, *sink: Tensor) -> tuple[Tensor, Tensor]:
        return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])

    def _fake_gather(self, table: Tensor, kv_lens: Tensor, *planes: Tensor) -> tuple[Tensor, Tensor]:
        att = self._library.spec.attention
        rows = torch.library.get_ctx().new_dynamic_size()  # the lengths' sum: a value, not a shape
        dtype = torch_dtype(att.q_dtype)
        k = table.new_empty(rows, att.kv_heads, att.head_dim, dtype=dtype)
        if self._library.spec.cache.alias:
            # An op may not return views of what it returns beside.
            return k, k.new_empty(rows, att.kv_heads, att.v_head_dim)
        return k, table.new_empty(rows, att.kv_heads, att.v_head_dim, dtype=dtype)


_PAIR = "(Tensor, Tensor)"
_OPTIONS = ", *, float? scale=None, int? num_threads=None"


def _free(namespace: str) -> str:
    """``namespace`` if it is free in this process, else with the first free number behind it."""
    if not isinstance(namespace, str) or not namespace.isidentifier() or not namespace.isascii():
        raise ArgumentError(f"namespace = {brief(namespace)}: give an identifier, such as my_kernels")
    names = itertools.chain([namespace], (f"{namespace}_{number}" for number in itertools.count(2)))
    # Torch is asked, not a list of our own: a package that is imported again brings a new one.
    return next(name for name in names if not hasattr(getattr(torch.ops, name), "append"))
