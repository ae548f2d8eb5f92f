"""The attention ops: decode and prefill over a paged cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from kvgen.errors import ArgumentError, brief
from kvgen.ir import Param
from kvgen.runtime import arguments as check
from kvgen.runtime import places
from kvgen.runtime.base import OpsBase, Tensor, output_values
from kvgen.runtime.cache import Cache, torch_dtype
from kvgen.runtime.params import ROPE, SINK, bind, is_static, static_key
from kvgen.runtime.raw_checks import check_read
from kvgen.runtime.renamed import accept_former_names


class AttentionOps(OpsBase):
    """``decode`` and ``prefill``."""

    @accept_former_names
    def decode(
        self,
        q: Tensor,
        cache: Cache,
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
        """Attention of one query a request (or a few each, with ``q_starts``) over its pages.

        q (B, q_heads, head_dim) of q_dtype, or (T, ...) with q_starts (B+1,) int32; page_table (B, P)
        int32; kv_lens (B,) int32 counts the keys after this step's append. ``params``: the spec's parameters
        by name. Without ``finalize`` a spec's sink is left out: ``merge`` adds it once.
        Returns out like q with v_head_dim, and lse (rows, q_heads) f32 in base 2.
        """
        if params is not None or finalize is not True or self._wanted:
            params = self._parts(params, finalize, q)
        if isinstance(cache, Cache) and cache.traced():
            given = (q, *cache.planes.values(), page_table, kv_lens, *self._ordered(params), q_starts)
            return _into(cache.ops.decode(*given, scale=scale, num_threads=num_threads), out, lse)
        variant = "single" if q_starts is None else "multi"
        tensors = (q, q_starts, page_table, kv_lens, out, lse)
        return self._attend("decode", variant, cache, tensors, workspace, scale, params, num_threads)

    @accept_former_names
    def prefill(
        self,
        q: Tensor,
        cache: Cache,
        page_table: Tensor,
        kv_lens: Tensor,
        q_starts: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        scale: float | None = None,
        params: Mapping[str, Tensor] | None = None,
        workspace: Tensor | None = None,
        num_threads: int | None = None,
        finalize: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Attention of a ragged batch of queries over each request's pages, bottom-right causal.

        q (T, q_heads, head_dim); request b owns rows q_starts[b] .. q_starts[b+1] - 1. Otherwise as
        ``decode``.
        """
        if params is not None or finalize is not True or self._wanted:
            params = self._parts(params, finalize, q)
        if isinstance(cache, Cache) and cache.traced():
            given = (q, *cache.planes.values(), page_table, kv_lens, *self._ordered(params), q_starts)
            return _into(cache.ops.prefill(*given, scale=scale, num_threads=num_threads), out, lse)
        check.need_starts(q_starts)
        tensors = (q, q_starts, page_table, kv_lens, out, lse)
        return self._attend("prefill", "", cache, tensors, workspace, scale, params, num_threads)

    @accept_former_names
    def workspace_bytes(
        self,
        op: str,
        q: Tensor,
        cache: Cache,
        page_table: Tensor,
        kv_lens: Tensor,
        q_starts: Tensor | None = None,
        *,
        params: Mapping[str, Tensor] | None = None,
        num_threads: int | None = None,
    ) -> int:
        """Bytes that ``workspace=`` must hold for ``decode`` or ``prefill`` with these arguments."""
        if not isinstance(op, str) or op not in ("decode", "prefill"):
            raise ArgumentError(f"op = {brief(op)}: only decode and prefill take a workspace")
        if op == "prefill":
            check.need_starts(q_starts)
        variant = "" if op == "prefill" else "single" if q_starts is None else "multi"
        params = self._parts(params, True, q)
        tables = (page_table, kv_lens, q_starts)
        values = self._attention(q, cache, *tables, None, params, num_threads)
        return self.kernel(op, variant).workspace(values) if q.shape[0] else 0

    def _attend(
        self,
        op: str,
        variant: str,
        cache: Cache,
        tensors: tuple[Tensor | None, ...],
        workspace: Tensor | None,
        scale: Any,
        params: Any,
        num_threads: int | None,
    ) -> tuple[Tensor, Tensor]:
        """A call of known shapes at once, any other after every check.

        ``tensors``: q, q_starts, page_table, kv_lens, out, lse.
        """
        calls = cache.calls if isinstance(cache, Cache) else None
        if params is None:
            extra: Any = ()
        elif calls is not None and self._fixed and is_static(params):
            extra = static_key(params)
        else:
            calls = None
        if calls is not None:
            done = calls.attend(self, op, tensors, workspace, scale, num_threads, extra)
            if done is not None:
                return done
        q, q_starts, table, kv_lens, out, lse = tensors
        values = self._attention(q, cache, table, kv_lens, q_starts, scale, params, num_threads)
        made = self._run(op, variant, cache, values, out, lse, workspace)
        if calls is not None and made[0].shape[0]:
            kernel = self.kernel(op, variant)
            self._remember(op, kernel, calls, (*tensors[:4], *made), tensors, values, scale, extra)
        return made

    def _attention(
        self,
        q: Tensor,
        cache: Cache,
        table: Tensor,
        kv_lens: Tensor,
        q_starts: Tensor | None,
        scale: float | None,
        params: Mapping[str, Tensor] | None,
        num_threads: int | None,
    ) -> dict[str, Any]:
        self._own(cache)
        att = self.spec.attention
        check.need_table(table, cache.device)
        batch = check.batch_of(table, kv_lens, *(("q", q) if q_starts is None else ("q_starts", q_starts)))
        rows: int | str = "T" if q_starts is not None else batch
        check.need("q", q, (torch_dtype(att.q_dtype),), (rows, att.q_heads, att.head_dim), cache.device)
        max_q_len = self._check_table(cache, table, kv_lens, q_starts, batch=batch, total=q.shape[0])
        scale = att.scale if scale is None else check.need_scale(scale, att.scale)
        sizes = {"batch": kv_lens.shape[0], "head": att.q_heads, "q": q.shape[0]}
        read = 1
        if self._wanted and self._checks_values(cache):
            read = max(1, int(kv_lens.max())) if kv_lens.shape[0] else 1
        return {
            **cache.arguments(),
            **bind(self._wanted, params, sizes | self._rotary, cache.device, kv=read),
            "q": q,
            "q_stride_tok": q.stride(0),
            "q_stride_head": q.stride(1),
            "q_starts": q_starts,
            "page_table": table,
            "table_stride": table.stride(0),
            "kv_lens": kv_lens,
            "batch": kv_lens.shape[0],
            "max_q_len": max_q_len,
            "table_width": table.shape[1],
            "score_scale": scale * math.log2(math.e),
            "num_threads": num_threads,
        }

    def _check_table(
        self,
        cache: Cache,
        table: Tensor,
        kv_lens: Tensor,
        q_starts: Tensor | None,
        *,
        batch: int | None = None,
        total: int = 0,
        ranged: bool = True,
    ) -> int:
        """Check the batch's tables; returns an upper bound of the queries of one request."""
        import torch

        check.need_table(table, cache.device)
        batch = table.shape[0] if batch is None else batch
        check.need("page_table", table, (torch.int32,), (batch, "P"), cache.device)
        check.need("kv_lens", kv_lens, (torch.int32,), (batch,), cache.device)
        if q_starts is not None:
            check.need("q_starts", q_starts, (torch.int32,), (batch + 1,), cache.device)
        if cache.device.type != "cpu":
            return total if q_starts is not None else 1
        q_lens = np.diff(q_starts.numpy()) if q_starts is not None else np.ones(batch, np.int32)
        if self._checks_values(cache):
            page = self.spec.cache.page_size
            check.check_lens(kv_lens, table, page)
            if q_starts is not None:
                check.check_starts("q_starts", q_starts, total)
            lens = kv_lens.numpy().astype(np.int64)
            first = np.zeros_like(lens)
            if ranged and self.spec.attention.window is not None:
                first = np.maximum(0, lens - q_lens - self.spec.attention.window) // page
            if not (ranged and self.spec.attention.options):  # which pages are read is the kernel's to say
                check.check_pages(table, first, -(-lens // page), cache.num_pages)
            if self.spec.cache.raw is not None:
                check_read(cache, table, kv_lens, first)
        return int(q_lens.max()) if batch else 0

    def _run(
        self,
        op: str,
        variant: str,
        cache: Cache,
        values: dict[str, Any],
        out: Tensor | None,
        lse: Tensor | None,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q = values["q"]
        given = {name: t for name, t in (("out", out), ("lse", lse)) if t is not None}
        out, lse = self._outputs(out, lse, q.shape[0], q.dtype, q.device)
        values |= output_values(out, lse)
        kernel = self.kernel(op, variant)
        if self.spec.attention.options and self._checks_values(cache):
            rule = getattr(kernel, "broken_rule", None)
            if rule is not None and rule(values, cache.num_pages, out.shape[0]):
                ends = -(-values["kv_lens"].numpy().astype(np.int64) // self.spec.cache.page_size)
                check.check_pages(values["page_table"], np.zeros_like(ends), ends, cache.num_pages)
        need = kernel.workspace(values) if out.shape[0] else 0
        if workspace is not None:
            check.need_workspace(workspace, need, out.device)
            given["workspace"] = workspace
        if given:
            names = ("q", "q_starts", "page_table", "kv_lens", *(f"param_{p.name}" for p in self._wanted))
            read = {name: values[name] for name in names}
            held = {name: tensor for name, tensor in read.items() if tensor is not None}
            places.need_apart(given, held | cache.fields())
        if out.shape[0]:
            values["workspace"] = self.scratch(need, out.device) if workspace is None else workspace
            kernel.launch(values)
        return out, lse

    @cached_property
    def _wanted(self) -> tuple[Param, ...]:
        """Parameters of decode and prefill, in the order of the ABI."""
        att = self.spec.attention
        return att.params + ((ROPE,) if att.rope and att.rope.stored == "pre" else ())

    @cached_property
    def _fixed(self) -> bool:
        """Whether shapes say all of the parameters' sizes: how many positions are read, lengths say."""
        return all("kv" not in param.dims for param in self._wanted)

    @cached_property
    def _rotary(self) -> dict[str, int]:
        rope = self.spec.attention.rope
        return {"d": rope.dim} if rope else {}

    def _parts(self, params: Any, finalize: bool, like: Tensor) -> Any:
        """``params``, with a sink of no weight where the state stays unfinished; None for no parameters."""
        check.need_bool("finalize", finalize)
        if params is not None and not isinstance(params, Mapping):
            return params  # refused where its names are looked up
        if not self._wanted and not params:
            return None
        if finalize or not self.spec.attention.sink:
            return {} if params is None else params
        return {**(params or {}), SINK.name: self._no_sink(like.device)}

    def _no_sink(self, device: Any) -> Tensor:
        """Logits of minus infinity, made once for each device."""
        import torch

        found = self._no_sinks.get(device)
        if found is None:
            heads = self.spec.attention.q_heads
            found = self._no_sinks[device] = torch.full(
                (heads,), -math.inf, dtype=torch.float32, device=device
            )
        return found

    @cached_property
    def _no_sinks(self) -> dict[Any, Tensor]:
        return {}

    def _ordered(self, params: Any) -> tuple[Tensor, ...]:
        """Parameters as a custom op takes them."""
        names = [param.name for param in self._wanted]
        given = {} if params is None else params
        if not isinstance(given, Mapping) or set(given) != set(names):
            raise ArgumentError(f"params: give a mapping with a tensor for each of {names}, and no other")
        return tuple(given[name] for name in names)

    def scratch(self, nbytes: int, device: Any) -> Tensor:
        """Workspace for a call that brought none.

        On the CPU the library keeps one for each thread, because kernels run without the interpreter lock.
        On a GPU torch's allocator is asked each time: it knows which stream still uses what.
        """
        if device.type != "cpu":
            import torch

            return check.empty("workspace", (max(nbytes, 64),), torch.uint8, device)
        held: Tensor = getattr(self._workspaces, "held", None)
        if held is None or held.nbytes < nbytes:
            import torch

            held = self._workspaces.held = check.empty("workspace", (max(nbytes, 64),), torch.uint8, device)
        return held

    @cached_property
    def _workspaces(self) -> threading.local:
        return threading.local()


def _into(made: tuple[Tensor, Tensor], out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs of a traced op, where the caller wants them (torch.compile places its own)."""
    return made[0] if out is None else out.copy_(made[0]), made[1] if lse is None else lse.copy_(made[1])
