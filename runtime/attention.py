"""The attention ops: decode and prefill over a paged cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from kvgen.errors import ArgumentError, brief
from kvgen.runtime import arguments as check
from kvgen.runtime import places
from kvgen.runtime.base import OpsBase, Tensor, output_values
from kvgen.runtime.cache import Cache, torch_dtype


class AttentionOps(OpsBase):
    """``decode`` and ``prefill``."""

    def decode(
        self,
        q_BHD: Tensor,
        cache: Cache,
        page_table_BP: Tensor,
        kv_lens_B: Tensor,
        q_starts_B1: Tensor | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        scale: float | None = None,
        params: Mapping[str, Tensor] | None = None,
        workspace: Tensor | None = None,
        num_threads: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one query a request (or a few each, with ``q_starts``) over its pages.

        q (B, q_heads, head_dim) of q_dtype, or (T, ...) with q_starts (B+1,) int32; page_table (B, P)
        int32; kv_lens (B,) int32 counts the keys after this step's append.
        Returns out like q with v_head_dim, and lse (rows, q_heads) f32 in base 2.
        """
        if isinstance(cache, Cache) and cache.traced():
            given = (q_BHD, *cache.planes.values(), page_table_BP, kv_lens_B, q_starts_B1)
            check.need_no_params(params)
            return _into(cache.ops.decode(*given, scale=scale, num_threads=num_threads), out, lse)
        variant = "single" if q_starts_B1 is None else "multi"
        tensors = (q_BHD, q_starts_B1, page_table_BP, kv_lens_B, out, lse)
        return self._attend("decode", variant, cache, tensors, workspace, scale, params, num_threads)

    def prefill(
        self,
        q_THD: Tensor,
        cache: Cache,
        page_table_BP: Tensor,
        kv_lens_B: Tensor,
        q_starts_B1: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        scale: float | None = None,
        params: Mapping[str, Tensor] | None = None,
        workspace: Tensor | None = None,
        num_threads: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of a ragged batch of queries over each request's pages, bottom-right causal.

        q (T, q_heads, head_dim); request b owns rows q_starts[b] .. q_starts[b+1] - 1. Otherwise as
        ``decode``.
        """
        if isinstance(cache, Cache) and cache.traced():
            given = (q_THD, *cache.planes.values(), page_table_BP, kv_lens_B, q_starts_B1)
            check.need_no_params(params)
            return _into(cache.ops.prefill(*given, scale=scale, num_threads=num_threads), out, lse)
        check.need_starts(q_starts_B1)
        tensors = (q_THD, q_starts_B1, page_table_BP, kv_lens_B, out, lse)
        return self._attend("prefill", "", cache, tensors, workspace, scale, params, num_threads)

    def workspace_bytes(
        self,
        op: str,
        q_THD: Tensor,
        cache: Cache,
        page_table_BP: Tensor,
        kv_lens_B: Tensor,
        q_starts_B1: Tensor | None = None,
        *,
        num_threads: int | None = None,
    ) -> int:
        """Bytes that ``workspace=`` must hold for ``decode`` or ``prefill`` with these arguments."""
        if not isinstance(op, str) or op not in ("decode", "prefill"):
            raise ArgumentError(f"op = {brief(op)}: only decode and prefill take a workspace")
        if op == "prefill":
            check.need_starts(q_starts_B1)
        variant = "" if op == "prefill" else "single" if q_starts_B1 is None else "multi"
        values = self._attention(q_THD, cache, page_table_BP, kv_lens_B, q_starts_B1, None, None, num_threads)
        return self.kernel(op, variant).workspace(values) if q_THD.shape[0] else 0

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
        if calls is not None and params is None:
            done = calls.attend(self, op, tensors, workspace, scale, num_threads)
            if done is not None:
                return done
        q, q_starts, table, kv_lens, out, lse = tensors
        values = self._attention(q, cache, table, kv_lens, q_starts, scale, params, num_threads)
        made = self._run(op, variant, cache, values, out, lse, workspace)
        if calls is not None and made[0].shape[0]:
            kernel = self.kernel(op, variant)
            self._remember(op, kernel, calls, (*tensors[:4], *made), tensors, values, scale)
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
        check.need_no_params(params)
        att = self.spec.attention
        places.need_tensor("page_table", table)
        # A table of no dimensions has no rows to compare with; it is refused for itself below.
        rows: int | str = "T" if q_starts is not None else (*table.shape, "B")[0]
        check.need("q", q, (torch_dtype(att.q_dtype),), (rows, att.q_heads, att.head_dim), cache.device)
        max_q_len = self._check_table(cache, table, kv_lens, q_starts, total=q.shape[0])
        scale = att.scale if scale is None else check.need_scale(scale, att.scale)
        return {
            **cache.arguments(),
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
        total: int = 0,
        ranged: bool = True,
    ) -> int:
        """Check the batch's tables; returns an upper bound of the queries of one request."""
        import torch

        check.need("page_table", table, (torch.int32,), ("B", "P"), cache.device)
        batch = table.shape[0]
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
            check.check_pages(table, first, -(-lens // page), cache.num_pages)
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
        need = kernel.workspace(values) if out.shape[0] else 0
        if workspace is not None:
            check.need_workspace(workspace, need, out.device)
            given["workspace"] = workspace
        if given:
            read = {name: values[name] for name in ("q", "q_starts", "page_table", "kv_lens")}
            held = {name: tensor for name, tensor in read.items() if tensor is not None}
            places.need_apart(given, held | cache.fields())
        if out.shape[0]:
            values["workspace"] = self.scratch(need, out.device) if workspace is None else workspace
            kernel.launch(values)
        return out, lse

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
