"""A request's output has the same bits alone, in any batch, at any thread count, and however it was cut."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tests.support.engines import CPU_ROWS, engine_params, library
from tests.support.specs import make_spec
from tests.support.world import World

LENS = [700, 3, 0, 129, 64, 1, 1500]
Q_LENS = [5, 3, 2, 8, 1, 1, 4]
SPECS = {
    "bf16": make_spec("bf16", "bf16", kv_heads=2, group=3, head_dim=72, q_dtype="bf16"),
    "int8-window": make_spec("int8-token", "int8-token", page_size=5, kv_heads=4, group=4, mask=(True, 100)),
    "f16-static": make_spec("f16", "int8-head", layout="nhd", kv_heads=2, group=1, q_dtype="f16"),
}


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_a_result_does_not_depend_on_its_batch(row: str, name: str) -> None:
    split = 270 if SPECS[name].cache.page_size == 5 else 256  # whole tiles of pages
    lib = library(row, SPECS[name], {"decode": {"split_tokens": split}})
    page = lib.spec.cache.page_size
    world = World(lib, sum(-(-n // page) for n in LENS))
    table = world.table(LENS)
    world.fill(table, LENS)
    starts = [0, *accumulate(Q_LENS)]
    q = world.query(starts[-1])

    def run(op: str, requests: list[int], threads: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Rows of out and lse of each request, computed together."""
        single = op == "single"
        rows = [[starts[b]] if single else list(range(starts[b], starts[b + 1])) for b in requests]
        picked = q[[i for part in rows for i in part]]
        lens = world.ints([LENS[b] for b in requests])
        cuts = [0, *accumulate(map(len, rows))]
        args = (picked, world.cache, table[requests].contiguous(), lens)
        call = lib.prefill if op == "prefill" else lib.decode
        out, lse = call(*args, *(() if single else (world.ints(cuts),)), num_threads=threads)
        return {b: (out[cuts[i] : cuts[i + 1]], lse[cuts[i] : cuts[i + 1]]) for i, b in enumerate(requests)}

    everybody = list(range(len(LENS)))
    for op in ("single", "multi", "prefill"):
        alone = {b: run(op, [b], 1)[b] for b in everybody}
        for requests, threads in ((everybody, 1), (everybody, 2), (everybody[::-1], 2), ([3, 0, 3], 2)):
            for b, got in run(op, requests, threads).items():
                for have, want in zip(got, alone[b], strict=True):
                    assert torch.equal(have, want), f"{op} of request {b} in {requests}, {threads} threads"


@pytest.mark.parametrize("name", ["bf16", "f16-static"])
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_chunks_of_a_prompt_give_the_bits_of_the_whole(row: str, name: str) -> None:
    """Causal without a window: rows 90 and on of a prefill of 150, computed after 90 tokens were cached."""
    lib = library(row, SPECS[name])
    world = World(lib, 12)
    table, lens = world.table([150]), world.ints([150])
    world.fill(table, [150])
    q = world.query(150)
    whole = lib.prefill(q, world.cache, table, lens, world.ints([0, 150]))
    for cut in (90, 64, 149):
        part = lib.prefill(q[cut:], world.cache, table, lens, world.ints([0, 150 - cut]))
        assert torch.equal(part[0], whole[0][cut:]) and torch.equal(part[1], whole[1][cut:])
