"""Direct calls of Triton kernels: a poisoned cache as the ABI names it, filled through the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvgen import reference
from kvgen.backends.triton.backend import TritonBackend
from kvgen.backends.triton.kernel import TritonKernel
from kvgen.ir import Spec
from kvgen.ir.plan import KernelPlan
from kvgen.passes.abi import attention_params
from kvgen.passes.place import place
from kvgen.reference.rope import rope_table
from kvgen.runtime.cache import torch_dtype
from kvgen.targets import TARGETS
from kvgen.tune.given import given_means
from kvgen.tune.raw_rows import raw_pool, raw_rows_of
from kvgen.tune.scene import known
from kvgen.tune.space import load_space, spec_facts
from kvgen.variants import positions
from kvgen.variants.samples import sample_params
from tests.support.oracle import to_numpy
from tests.support.world import plane_views, raw_views, static_scales

BACKEND = TritonBackend()


def plan(op: str, spec: Spec, target: str, variant: str = "", **knobs: Any) -> KernelPlan:
    """The plan under the default schedule of the target, some knobs replaced."""
    chip = TARGETS[target]
    schedule = load_space(BACKEND.space(op)).default(chip, spec_facts(spec, chip)).replace(**knobs)
    return BACKEND.plan(op, spec, place(spec), schedule, chip, variant)


def kernel(op: str, spec: Spec, target: str = "interpret", variant: str = "", **knobs: Any) -> TritonKernel:
    """The kernel of ``plan``."""
    return BACKEND.compile([plan(op, spec, target, variant, **knobs)])[0]


class Pools:
    """A cache of poisoned bytes with the oracle's and the kernels' views of them."""

    def __init__(self, spec: Spec, pages: int) -> None:
        self.spec, self.record, self.pages = spec, place(spec), pages
        raw = raw_pool(self.record, pages)
        self.bytes = reference.new_pools(self.record, pages, 0xFF) | raw
        self.scales, self.means = static_scales(spec), given_means(spec)
        self.raw_rows = np.full(pages, -1, np.int32) if raw else None
        self.oracle_scales = {k: v.numpy() for k, v in self.scales.items()} if self.scales else None

    @property
    def known(self) -> dict[str, Any]:
        """What the oracle's ops take beside the buffers."""
        return known(self.oracle_scales or {}, self.means, self.raw_rows)

    def values(self) -> dict[str, Any]:
        """Planes, strides, given scales, means and raw rows by ABI name."""
        views = plane_views(self.record, self.pages, self.bytes)
        found: dict[str, Any] = dict(views)
        for plane in self.record.planes:
            for axis in (plane.page, *plane.outside):
                found[f"{plane.name}_stride_{axis.axis.key}"] = axis.stride.at(self.pages) // plane.itemsize
        for name, _, _ in self.spec.given_scales():
            found[name] = (self.scales or {})[name.rpartition("_")[0]].reshape(-1)
        for side, mean in self.means.items():
            found[f"{side}_mean"] = torch.from_numpy(mean)
        if self.raw_rows is not None:
            found |= raw_views(self.record, self.bytes["raw"]) | {"raw_rows": torch.from_numpy(self.raw_rows)}
            for plane in self.record.raw:
                found[f"{plane.name}_stride_page"] = plane.page.stride.fixed // plane.itemsize
        return found

    def fill(self, lens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Random tokens for requests of these lengths on permuted pages; the table, its tails poisoned."""
        att, size = self.spec.attention, self.spec.cache.page_size
        free = list(np.random.default_rng(0).permutation(self.pages))
        table = np.full((len(lens), max(-(-n // size) for n in lens) + 2), 2**31 - 1, np.int32)
        slots = []
        for b, n in enumerate(lens):
            for column in range(-(-n // size)):
                table[b, column] = free.pop()
            slots += [int(table[b, t // size]) * size + t % size for t in range(n)]
        generator = torch.Generator().manual_seed(0)
        k = torch.randn(len(slots), att.kv_heads, att.head_dim, generator=generator)
        v = torch.randn(len(slots), att.kv_heads, att.v_head_dim, generator=generator)
        where = (self.spec, self.record, self.bytes, self.pages)
        rows = (k.numpy(), None if self.spec.cache.alias else v.numpy())
        if self.raw_rows is None:
            reference.append(*where, *rows, slots, **self.known)
            return table
        pages = [row[: -(-n // size)].tolist() for row, n in zip(table, lens, strict=True)]
        self.raw_rows[:] = raw_rows_of(self.spec.cache.raw, pages, lens, self.pages)[0]
        starts = np.concatenate([[0], np.cumsum(lens)])
        reference.append_requests(*where, *rows, pages, lens, starts, **self.known)
        return table


def call_params(spec: Spec, lens: Sequence[int], starts: Any) -> dict[str, Any]:
    """Parameters for one call: hard samples, and the table of angles where K is turned when it is read."""
    found = sample_params(spec, kv_lens=lens, q_starts=starts, rng=np.random.default_rng(2))
    rope = spec.attention.rope
    if rope and rope.stored == "pre":
        frequencies, factor = positions()[rope.kind].frequencies(rope)
        found["rope_table"] = rope_table(frequencies, factor, max(lens) + 1)
    return found


def param_values(spec: Spec, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters and their strides by ABI name."""
    found: dict[str, Any] = {}
    for param in attention_params(spec):
        tensor = torch.from_numpy(params[param.name])
        found[f"param_{param.name}"] = tensor
        for axis, dim in enumerate(param.dims[:-1]):
            found[f"param_{param.name}_stride_{dim}"] = tensor.stride(axis)
    return found


def attend(
    op: str,
    spec: Spec,
    lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    edit: Callable[[dict[str, Any], Any], None] | None = None,
    params: dict[str, Any] | None = None,
    variant: str = "",
    **knobs: Any,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(out, lse) of the interpreted kernel and of the oracle, as f64 arrays.

    ``edit`` changes the filled cache, given its planes by name and the page table; ``params`` replace
    sampled parameters. ``variant`` is ``prefix`` for the kernel of a shared prefix: no sink, all keys seen.
    """
    att = spec.attention
    pools = Pools(spec, sum(-(-n // spec.cache.page_size) for n in lens) + 2)
    table = pools.fill(lens)
    if edit is not None:
        edit(pools.values(), table)
    starts = np.concatenate([[0], np.cumsum(q_lens or [1] * len(lens))]).astype(np.int32)
    rows = int(starts[-1])
    given = call_params(spec, lens, starts) | (params or {})
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows, att.q_heads, att.head_dim, generator=generator).to(torch_dtype(att.q_dtype))
    out = torch.full((rows, att.q_heads, att.v_head_dim), float("nan"), dtype=q.dtype)
    lse = torch.full((rows, att.q_heads), float("nan"))
    values = pools.values() | param_values(spec, given) | {
        "q": q, "q_stride_tok": q.stride(0), "q_stride_head": q.stride(1),
        "q_starts": torch.from_numpy(starts),
        "page_table": torch.from_numpy(table), "table_stride": table.shape[1],
        "kv_lens": torch.tensor(list(lens), dtype=torch.int32),
        "out": out, "out_stride_tok": out.stride(0), "out_stride_head": out.stride(1),
        "lse": lse, "lse_stride_tok": lse.stride(0), "batch": len(lens), "max_q_len": max(q_lens or [1]),
        "table_width": table.shape[1], "score_scale": att.scale / float(np.log(2.0)),
    }  # fmt: skip
    chosen = variant or ("" if op == "prefill" else "single" if q_lens is None else "multi")
    built = kernel(op, spec, "interpret", chosen, **knobs)
    values["workspace"] = torch.full((built.workspace(values),), 0xFF, dtype=torch.uint8)
    built.launch(values)
    if variant:
        spec = replace(spec, attention=replace(att, causal=False))
    want = reference.prefill(
        spec, pools.record, pools.bytes, pools.pages, table, lens, to_numpy(q), starts,
        **pools.known, params=given, finalize=not variant,
    )  # fmt: skip
    return (out.double().numpy(), lse.double().numpy()), want
