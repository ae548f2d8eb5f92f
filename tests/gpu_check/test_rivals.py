"""The rivals compute what our kernels do: on the CPU, where kernels can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.capture import Capture
from kvgen.gpu_check import compare, rivals
from kvgen.gpu_check.scenes import Workload
from tests.support.engines import library
from tests.support.specs import make_spec

SPEC = make_spec("f32", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)


def workload(op: str, sizes: tuple[int, ...]) -> tuple[Any, Workload, torch.Tensor]:
    lib: Any = library("portable", SPEC)
    batch, context = sizes[0], sizes[-1]
    rows = batch if op == "decode" else batch * sizes[1]
    cache = lib.new_cache(batch * context // 4)
    for plane in cache.planes.values():
        plane.normal_()
    table = torch.randperm(cache.num_pages).int().reshape(batch, -1)
    lens = torch.full((batch,), context, dtype=torch.int32)
    starts = None if op == "decode" else torch.arange(batch + 1, dtype=torch.int32) * sizes[1]
    q = torch.randn(rows, 4, 16)
    seen = Capture(SPEC)
    getattr(seen, op)(q, cache, table, lens, starts)
    out = getattr(lib, op)(q, cache, table, lens, starts)[0]
    return lib, Workload(op, sizes, cache, [seen.values], tables=[table], q=q), out


@pytest.mark.parametrize(("op", "sizes"), [("decode", (3, 20)), ("prefill", (2, 12, 12))])
def test_sdpa_agrees_with_the_kernel(op: str, sizes: tuple[int, ...]) -> None:
    lib, work, ours = workload(op, sizes)
    makers = rivals.attention(lib, work)
    assert list(makers) == [*(["torch SDPA", "gather + SDPA"] if op == "decode" else ["torch SDPA"]), FLEX]
    for name, make in makers.items():
        if name != FLEX:  # its compiler takes half a minute
            assert compare._difference(lib, work, ours, make()(0)) < 1e-5, name
    work.q.mul_(2)
    assert compare._difference(lib, work, ours, makers["torch SDPA"]()(0)) > compare.CLOSE_ENOUGH


FLEX = "torch flex_attention"


def test_no_rival_for_queries_that_begin_inside_the_keys() -> None:
    lib, work, _ = workload("prefill", (2, 4, 12))
    assert not rivals.attention(lib, work)


def test_append_puts_the_same_rows() -> None:
    lib: Any = library("portable", SPEC)
    cache = lib.new_cache(4)
    k, v, slots = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.tensor([1, 7, 12])
    seen = Capture(SPEC)
    seen.append(cache, k, v, slots)
    (make,) = rivals.append(lib, Workload("append", (3,), cache, [seen.values])).values()
    run = make()
    run(0)
    pools = [cell.cell_contents for cell in run.__closure__ or () if isinstance(cell.cell_contents, list)]
    assert torch.equal(pools[0][0][slots], k) and torch.equal(pools[0][1][slots], v)
