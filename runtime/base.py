"""What all ops share: who owns a cache, outputs that the caller did not give, the kernel to launch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kvgen.backends.cpu import machine
from kvgen.errors import ArgumentError
from kvgen.ir import PageRecord, Spec
from kvgen.runtime import arguments as check
from kvgen.runtime.adopt import adopt
from kvgen.runtime.cache import Cache, new_cache
from kvgen.runtime.footprint import Footprint, footprint

if TYPE_CHECKING:
    import torch

    from kvgen.runtime.custom_ops import TorchOps
    from kvgen.runtime.quick import Calls

Tensor = Any
"""A torch tensor (torch is imported only when an op runs)."""


_SERIALS = itertools.count()


class Launchable(Protocol):
    """A compiled op, wherever it comes from."""

    def workspace(self, values: Mapping[str, Any]) -> int:
        """Bytes of workspace that a launch with these values needs."""
        ...

    def launch(self, values: Mapping[str, Any]) -> None:
        """Run with values by ABI name."""
        ...


class OpsBase:
    """Checks and allocations shared by the ops. A subclass says where kernels come from."""

    spec: Spec
    record: PageRecord
    checked: bool
    """Whether values (lengths, page ids, slots) are checked as well as shapes; CPU only."""

    def __repr__(self) -> str:
        att, cache = self.spec.attention, self.spec.cache
        heads = f"{att.q_heads} query and {att.kv_heads} KV heads of {att.head_dim}"
        k, v = (" + ".join(part.quant.format for part in self.spec.segments(side)) for side in "kv")
        stored = f"K {k}, V {'inside K' if cache.alias else v}"
        return f"{type(self).__name__}({self.spec.name}: {heads}, {stored}, pages of {cache.page_size})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError(
            f"a {type(self).__name__} cannot be pickled or copied: its kernels are loaded into this process. "
            "In another one build() from the spec again, which finds them in the cache folder, or load() an "
            "export"
        )

    @property
    def device(self) -> str:
        """Where ``new_cache`` puts its buffers."""
        return "cpu"

    def new_cache(
        self,
        num_pages: int,
        *,
        scales: Mapping[str, Tensor] | None = None,
        means: Mapping[str, Tensor] | None = None,
        raw_rows: int | None = None,
        layers: int = 1,
        device: str | None = None,
    ) -> Cache:
        """A zeroed cache of ``num_pages`` pages, for ``layers`` layers that share page ids.

        ``scales``, ``means`` and ``raw_rows``: see ``kvgen.runtime.cache.new_cache``.
        """
        device = self.device if device is None else device
        options: dict[str, Any] = {"scales": scales, "means": means, "raw_rows": raw_rows}
        made = new_cache(self.spec, self.record, num_pages, layers=layers, device=device, **options)
        for cache in made.layers:
            self._introduce(cache)
        return made

    def adopt(
        self,
        *,
        scales: Mapping[str, Tensor] | None = None,
        means: Mapping[str, Tensor] | None = None,
        **planes: Tensor,
    ) -> Cache:
        """A cache over buffers that someone else owns; see ``kvgen.runtime.adopt``."""
        return self._introduce(adopt(self.spec, self.record, scales=scales, means=means, **planes))

    @property
    def footprint(self) -> Footprint:
        """What a token costs in this cache: bytes of codes, scales and padding, and of a raw row."""
        return footprint(self.spec, self.record)

    def _introduce(self, cache: Cache) -> Cache:
        """Let torch.compile find the ops from a cache, and the ops a cache from its planes."""
        self._need_here(cache)
        cache.ops = self.torch_ops.ops
        cache.planes["k"].kvgen_cache = weakref.ref(cache)  # type: ignore[attr-defined]
        return cache

    def frequencies(self) -> tuple[list[float], float]:
        """Angles of one step of position, rotary dim / 2 of them, and the factor on cosines and sines."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its position scheme is")

    def rope_table(self, positions: int, *, device: str | None = None) -> Tensor:
        """The spec's angles for ``params={"rope_table": ...}``: (positions, rotary elements) f32.

        Cosines, then sines, of position times frequency in f32, as transformers' models compute them.
        """
        import torch

        rope = self.spec.attention.rope
        if rope is None:
            raise ArgumentError("rope_table: this spec has no [attention.rope]")
        count = check.need_integer("positions", positions, 1, 2**31 - 1, "give a positive integer")
        steps, factor = self.frequencies()
        with torch.device("cpu"):
            at = torch.arange(count, dtype=torch.float32)
            angles = (at[:, None] * torch.tensor(steps, dtype=torch.float64).float()).double()
            table = torch.cat([angles.cos() * factor, angles.sin() * factor], dim=1).float()
        return table.to(self.device if device is None else device)

    @cached_property
    def torch_ops(self) -> TorchOps:
        """The ops as custom ops of torch, under a namespace of this library's own."""
        from kvgen.runtime.custom_ops import TorchOps

        return TorchOps(self)

    @cached_property
    def serial(self) -> int:
        """A number that no other library of this process has."""
        return next(_SERIALS)

    def kernel(self, op: str, variant: str = "") -> Launchable:
        """The compiled kernel of ``op``."""
        raise NotImplementedError(f"{type(self).__name__} does not say where the kernel of {op} comes from")

    def _outputs(
        self, out: Tensor | None, lse: Tensor | None, rows: int, dtype: torch.dtype, device: Any
    ) -> tuple[Tensor, Tensor]:
        import torch

        att = self.spec.attention
        if out is None:
            out = check.empty("out", (rows, att.q_heads, att.v_head_dim), dtype, device)
        else:
            check.need("out", out, (dtype,), (rows, att.q_heads, att.v_head_dim), device)
        if lse is None:
            lse = check.empty("lse", (rows, att.q_heads), torch.float32, device)
        else:
            check.need("lse", lse, (torch.float32,), (rows, att.q_heads), device)
        return out, lse

    def _remember(
        self,
        op: str,
        kernel: Launchable,
        calls: Calls,
        made: tuple[Tensor | None, ...],
        given: tuple[Tensor | None, ...],
        values: Mapping[str, Any],
        scale: Any = None,
        extra: Any = (),
    ) -> None:
        """Keep a call that was checked, where its kernel can be called by addresses.

        ``given``: its tensors as given; ``made``: the same with the outputs that were allocated;
        ``extra``: what its parameters are.
        """
        from kvgen.runtime import quick

        prepare = getattr(kernel, "prepare", None)
        threads = machine.num_threads(values.get("num_threads"))
        key = quick.call_key(self.serial, op, given, scale, threads)
        if prepare is not None and key is not None:
            names = quick.APPENDED if op == "append" else quick.NUMBERS
            calls.put((key, extra), prepare(values, names), made, given, scale, threads)

    def _own(self, cache: Any) -> None:
        if not isinstance(cache, Cache):
            kind = type(cache).__name__
            whose = "another package's" if kind == "Cache" else f"a {kind}"
            raise ArgumentError(f"cache: {whose}; give what this library's new_cache() or adopt() returned")
        if cache.spec.hash != self.spec.hash:
            its, mine = (f"{spec.hash8} ('{spec.cache.layout}')" for spec in (cache.spec, self.spec))
            raise ArgumentError(
                f"cache: made for spec {its}, but this library reads {mine}; "
                "the layout is part of a cache's value: use the library that made it"
            )

        self._need_here(cache)

    def _need_here(self, cache: Cache) -> None:
        """Refuse a cache whose memory this library's kernels cannot reach."""
        if cache.device.type != self.device:
            raise ArgumentError(
                f"cache: on {cache.device}, but the kernels run on {self.device}; give device={self.device!r}"
            )

    def _checks_values(self, cache: Cache) -> bool:
        return self.checked and cache.device.type == "cpu"


def dtype_name(dtype: Any) -> str:
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[str(dtype).removeprefix("torch.")]


def output_values(out: Tensor, lse: Tensor) -> dict[str, Any]:
    return {
        "out": out,
        "out_stride_tok": out.stride(0),
        "out_stride_head": out.stride(1),
        "lse": lse,
        "lse_stride_tok": lse.stride(0),
    }
