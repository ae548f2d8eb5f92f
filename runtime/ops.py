"""CacheOps: the six ops of a KV cache, checked and ready to call.

Arguments are checked here, outputs and workspace allocated where the caller gave none, and the kernel is
launched with values named as in ``kvgen.passes.abi``. A live build and an exported library are both this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError, brief
from kvgen.runtime import arguments as check
from kvgen.runtime import places
from kvgen.runtime.attention import AttentionOps
from kvgen.runtime.base import Tensor, dtype_name, output_values
from kvgen.runtime.cache import Cache, torch_dtype
from kvgen.runtime.cascade import cascade, cascade_workspace_bytes
from kvgen.runtime.params import ROPE, SINK, bind
from kvgen.runtime.raw import copy_rows
from kvgen.runtime.raw_append import append_requests
from kvgen.runtime.raw_checks import check_copied_rows
from kvgen.runtime.renamed import accept_former_names

if TYPE_CHECKING:
    import torch


class CacheOps(AttentionOps):
    """``append``, ``decode``, ``prefill``, ``merge``, ``copy`` and ``gather``; ``cascade`` calls three."""

    cascade = cascade
    cascade_workspace_bytes = cascade_workspace_bytes

    @accept_former_names
    def append(
        self,
        cache: Cache,
        k: Tensor,
        v: Tensor | None,
        slots: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        page_table: Tensor | None = None,
        kv_lens: Tensor | None = None,
        q_starts: Tensor | None = None,
        params: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write new keys and values into their slots, rotated and quantised as the spec says.

        k (T, kv_heads, head_dim), v (T, kv_heads, v_head_dim): f32, bf16 or f16, the same type; v is None
        where the spec has V inside K. slots (T,) int64: page * page_size + offset; -1 skips the token.
        Where the spec rotates K here: positions (T,) int32 and ``params={"rope_table": self.rope_table(n)}``.

        Where the spec leaves tokens unquantised (``spec.cache.raw``), not slots but requests say where rows
        go: page_table (B, P) int32, kv_lens (B,) int32 with the new tokens counted, and q_starts (B + 1,)
        int32, the first new row of each request. Nor positions: they follow from the lengths.
        """
        if self._by_request or not (page_table is kv_lens is q_starts is None):
            tables = (page_table, kv_lens, q_starts)
            append_requests(self, cache, k, v, slots, positions, tables, params)
            return
        turns = self._turns
        if isinstance(cache, Cache) and cache.traced():
            given = [k, v, slots, positions, (params or {}).get(ROPE.name)]
            wanted = (True, not self.spec.cache.alias, True, turns, turns)
            cache.ops.append(
                *(x for x, want in zip(given, wanted, strict=True) if want), *cache.planes.values()
            )
            return
        calls = None
        if v is not None and positions is None and params is None and not turns:
            calls = cache.calls if isinstance(cache, Cache) else None
            if calls is not None and slots is not None and calls.append(self, k, v, slots):
                return
        self._own(cache)
        import torch

        rows = self._rows(cache, k, v)
        tokens = k.shape[0]
        inputs = {"k": k, "slots": slots} | ({} if v is None else {"v": v})
        check.need("slots", slots, (torch.int64,), (tokens,), cache.device)
        turning = self._turning(positions, params, tokens, slots, cache)
        places.need_outside(inputs, cache.fields())
        if self._checks_values(cache):
            check.check_slots(slots, cache.capacity)
        if not tokens:
            return
        kernel = self.kernel("append", dtype_name(k.dtype))
        values = {**cache.arguments(), **rows, "slots": slots, "num_tokens": tokens, **turning}
        kernel.launch(values)
        if calls is not None:
            self._remember("append", kernel, calls, (k, v, slots), (k, v, slots), values)

    def _rows(self, cache: Cache, k: Tensor, v: Tensor | None) -> dict[str, Any]:
        """The new rows by ABI name, after their checks."""
        import torch

        att = self.spec.attention
        floats = (torch.bfloat16, torch.float16, torch.float32)
        check.need("k", k, floats, ("T", att.kv_heads, att.head_dim), cache.device)
        values = {"k_new": k, "k_new_stride_tok": k.stride(0), "k_new_stride_head": k.stride(1)}
        if self.spec.cache.alias:
            if v is not None:
                raise ArgumentError(f"v = {brief(v)}: V is a part of K in this cache; give None")
            return values
        check.need("v", v, (k.dtype,), (k.shape[0], att.kv_heads, att.v_head_dim), cache.device)
        assert v is not None
        return values | {"v_new": v, "v_new_stride_tok": v.stride(0), "v_new_stride_head": v.stride(1)}

    @cached_property
    def _by_request(self) -> bool:
        """Whether an append is told requests, not slots: some tokens become codes later than they come."""
        return self.spec.cache.raw is not None

    @cached_property
    def _turns(self) -> bool:
        """Whether an append rotates K."""
        rope = self.spec.attention.rope
        return rope is not None and rope.stored == "post"

    def _turning(
        self, positions: Tensor | None, params: Any, tokens: int, slots: Tensor, cache: Cache
    ) -> dict[str, Any]:
        """What an append's rotation reads, by ABI name."""
        import torch

        if not self._turns:
            if positions is not None:
                reason = "this spec does not rotate K at append"
                raise ArgumentError(f"positions = {brief(positions)}: {reason}; leave positions out")
            return bind((), params, {}, cache.device)
        if positions is None:
            raise ArgumentError("positions: missing; this spec rotates K at append: give (T,) int32")
        check.need("positions", positions, (torch.int32,), (tokens,), cache.device)
        values = bind((ROPE,), params, self._rotary, cache.device)
        if self._checks_values(cache):
            check.check_positions(positions, slots, values["param_rope_table"].shape[0])
        return {"positions": positions, **values}

    @accept_former_names
    def merge(
        self,
        outs: Tensor,
        lses: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        params: Mapping[str, Tensor] | None = None,
        finalize: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Merge N attention states of the same queries over disjoint keys.

        outs (N, T, q_heads, v_head_dim) f32, bf16 or f16; lses (N, T, q_heads) f32 base 2. ``out`` and
        ``lse`` may be one of the inputs. No states, or only empty ones, give (0, -inf). A spec's sink
        (``params={"sink_logit": ...}``) joins here, once, unless ``finalize`` is False: states that are
        merged must come from calls with ``finalize=False``.
        """
        import torch

        att = self.spec.attention
        wanted = (SINK,) if att.sink else ()
        check.need_bool("finalize", finalize)
        if not wanted and not finalize:
            finalize = True
        if wanted:
            params = self._parts(params, finalize, outs)
        if torch.compiler.is_compiling():
            check.need_default(out=out, lse=lse)
            sinks = [(params or {}).get(param.name) for param in wanted]
            return self.torch_ops.ops.merge(outs, lses, *sinks)  # type: ignore[no-any-return]
        # Nothing else says which device: without a tensor, ``need`` refuses outs for what it is.
        device = getattr(outs, "device", None)
        floats = (torch.float32, torch.bfloat16, torch.float16)
        check.need("outs", outs, floats, ("N", "T", att.q_heads, att.v_head_dim), device)
        states, tokens = outs.shape[:2]
        check.need("lses", lses, (torch.float32,), (states, tokens, att.q_heads), device)
        given = {name: t for name, t in (("out", out), ("lse", lse)) if t is not None}
        bound = bind(wanted, params, {"head": att.q_heads}, device)
        out, lse = self._outputs(out, lse, tokens, outs.dtype, device)
        if given:
            places.need_apart(given, bound)
        # One of the inputs is a fine place, state for state; a place across several is not.
        for name, made, own, other in (("out", out, outs, lses), ("lse", lse, lses, outs)):
            if name in given:
                inputs = {"outs": outs, "lses": lses}
                places.need_outside(
                    {name: made},
                    {key: t for key, t in inputs.items() if t is other or not places.is_row(made, own)},
                )
        if tokens:
            self.kernel("merge", dtype_name(outs.dtype)).launch(
                {
                    "outs": outs,
                    "outs_stride_state": outs.stride(0),
                    "outs_stride_tok": outs.stride(1),
                    "outs_stride_head": outs.stride(2),
                    "lses": lses,
                    "lses_stride_state": lses.stride(0),
                    "lses_stride_tok": lses.stride(1),
                    **output_values(out, lse),
                    "num_states": states,
                    "num_tokens": tokens,
                    **bound,
                }
            )
        return out, lse

    def copy(self, cache: Cache, src_pages: Tensor, dst_pages: Tensor) -> None:
        """Copy whole pages (fork, copy-on-write): src_pages[i] -> dst_pages[i], both (N,) int32.

        Tokens that are left unquantised go along: a page whose source has a raw row must have one too.
        """
        if isinstance(cache, Cache) and cache.traced():
            cache.ops.copy(src_pages, dst_pages, *cache.planes.values())
            return
        self._own(cache)
        import torch

        check.need("src_pages", src_pages, (torch.int32,), ("N",), cache.device)
        check.need("dst_pages", dst_pages, (torch.int32,), (src_pages.shape[0],), cache.device)
        places.need_outside({"src_pages": src_pages, "dst_pages": dst_pages}, cache.fields())
        if self._checks_values(cache):
            check.check_copy(src_pages, dst_pages, cache.num_pages)
            if self._by_request:
                check_copied_rows(cache, src_pages, dst_pages)
        if src_pages.shape[0]:
            pairs = {"src_pages": src_pages, "dst_pages": dst_pages, "num_pairs": src_pages.shape[0]}
            self.kernel("copy").launch({**cache.arguments(), **pairs})
            if self._by_request:
                copy_rows(cache, src_pages, dst_pages)

    @accept_former_names
    def gather(
        self,
        cache: Cache,
        page_table: Tensor,
        kv_lens: Tensor,
        *,
        dtype: torch.dtype | None = None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of each request as contiguous rows, decoded to ``dtype`` (q_dtype).

        Returns k (T, kv_heads, head_dim) and v (T, kv_heads, v_head_dim), requests one after another; v is a
        view of k where the spec has V inside K. Keys come as they are stored.
        On a GPU the row count T is read back once unless ``out=(k, v)`` is given.
        """
        if isinstance(cache, Cache) and cache.traced():
            check.need_default(dtype=dtype, out=out)
            return cache.ops.gather(page_table, kv_lens, *cache.planes.values())  # type: ignore[no-any-return]
        self._own(cache)
        import torch

        att = self.spec.attention
        self._check_table(cache, page_table, kv_lens, None, ranged=False)
        if out is not None:
            check.need_pair("out", out)
        if dtype is None:
            dtype = torch_dtype(att.q_dtype) if out is None else out[0].dtype
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ArgumentError(
                f"dtype = {brief(dtype)}: give torch.float32, torch.bfloat16 or torch.float16"
            )
        ends = torch.cumsum(kv_lens, 0, dtype=torch.int64)
        total = (int(ends[-1]) if len(ends) else 0) if out is None else out[0].shape[0]
        alias = self.spec.cache.alias
        if out is None:
            k = check.empty("k", (total, att.kv_heads, att.head_dim), dtype, cache.device)
            v = (
                k[..., : att.v_head_dim]
                if alias
                else check.empty("v", (total, att.kv_heads, att.v_head_dim), dtype, cache.device)
            )
        elif alias:
            reason = "V is a part of K in this cache: what is gathered is one tensor"
            raise ArgumentError(f"out = {brief(out)}: {reason}; leave out= out and use both results")
        else:
            k, v = out
            if cache.device.type == "cpu":
                total = int(ends[-1]) if len(ends) else 0
            check.need("out[0]", k, (dtype,), (total, att.kv_heads, att.head_dim), cache.device)
            check.need("out[1]", v, (dtype,), (total, att.kv_heads, att.v_head_dim), cache.device)
            read = {"page_table": page_table, "kv_lens": kv_lens}
            places.need_apart({"out[0]": k, "out[1]": v}, read | cache.fields())
        if total:
            capacity = page_table.shape[1] * self.spec.cache.page_size
            longest = int(kv_lens.max()) if cache.device.type == "cpu" else capacity
            self.kernel("gather", dtype_name(dtype)).launch(
                {
                    **cache.arguments(),
                    "page_table": page_table,
                    "table_stride": page_table.stride(0),
                    "kv_lens": kv_lens,
                    "kv_starts": ends - kv_lens,
                    "k_out": k,
                    "k_out_stride_tok": k.stride(0),
                    "k_out_stride_head": k.stride(1),
                    "v_out": v,
                    "v_out_stride_tok": v.stride(0),
                    "v_out_stride_head": v.stride(1),
                    "batch": kv_lens.shape[0],
                    "max_kv_len": longest,
                }
            )
        return k, v
