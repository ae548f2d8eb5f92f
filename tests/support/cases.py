"""One case of the base grid: a spec, a batch and a seed, and a check of every op of it against the oracle.

``check_case`` returns what is wrong as text, so that it can run in a guarded child process and so that one
batch of kernels reports all of its faults at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvgen.ir import Spec
from tests.support.compare import attention, differences
from tests.support.oracle import OracleLibrary
from tests.support.world import Where, World, poisoned

Q_LENS = (1, 3, 17, 37, 127)
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Case:
    """What a kernel is shown.

    ``spare``: pages beyond those that requests use. ``budget`` bounds the oracle's work, in multiplications.
    """

    spec: Spec
    batch: int = 3
    input: str = "f32"
    where: Where = "end"
    seed: int = 0
    spare: int = 4
    most: int = 2048
    most_q: int = 127
    budget: float = 1e8

    def kv_lens(self) -> list[int]:
        """Ragged lengths around every edge: nothing, one, a page less one, a page, a page and one, long."""
        page, att = self.spec.cache.page_size, self.spec.attention
        ragged = [0, 1, page - 1, page, page + 1, 54, 97, 512, 2048]
        start = self.seed % len(ragged)
        found = [ragged[(start + 4 * b) % len(ragged)] for b in range(min(self.batch, len(ragged)))]
        found += [ragged[b % 7] for b in range(self.batch - len(found))]
        found = [min(self.most, n) for n in found]
        width = att.q_heads * (att.head_dim + att.v_head_dim)
        # The long ones are thinned out where heads and elements make the oracle slow.
        while sum(found) * width > self.budget / 4:
            found[found.index(max(found))] //= 4
        return found

    def q_lens(self, kv_lens: list[int], choices: tuple[int, ...] = Q_LENS) -> list[int]:
        """Query counts, some of them above the request's keys: the first rows then see nothing."""
        att = self.spec.attention
        width, left, found = att.q_heads * (att.head_dim + att.v_head_dim), self.budget, []
        for b, kv in enumerate(kv_lens):
            q = min(self.most_q, choices[(self.seed + b) % len(choices)])
            while q > 1 and q * max(kv, 1) * width > left:
                q //= 2
            left -= q * kv * width
            found.append(q)
        return found


def check_case(lib: Any, case: Case) -> list[str]:
    """Every op of ``lib`` on the case's batch; returns all that is wrong, empty where nothing is."""
    lens = case.kv_lens()
    pages = sum(-(-n // case.spec.cache.page_size) for n in lens) + case.spare
    world = World(lib, pages, where=case.where, seed=case.seed)
    table = world.table(lens, shared=case.seed % 2 == 0)
    wrong = _append(world, case, table, lens)
    before = world.snapshot()
    lens_B = world.ints(lens)
    wrong += _gather(world, case, table, lens_B)
    starts = range(len(lens) + 1)
    wrong += _attend(world, "decode", table, lens_B, None, starts)
    for op, choices in (("decode", (1, 0, 3, 8, 2)), ("prefill", Q_LENS)):
        q_lens = case.q_lens(lens, choices)
        starts = [0, *accumulate(q_lens)]
        wrong += _attend(world, op, table, lens_B, world.ints(starts), starts)
    wrong += _merge(world, case)
    for name, at in world.changed(before).items():
        wrong += [f"readers changed {len(at)} bytes of pool {name}, first {at[0]}"] if len(at) else []
    return wrong + _copy(world)


def _append(world: World, case: Case, table: torch.Tensor, lens: list[int]) -> list[str]:
    """Bytes of all pools equal those that the oracle leaves: the slots', and every other as it was."""
    att, dtype = world.spec.attention, FLOATS[case.input]
    slots = world.slots(table, lens)
    world.rng.shuffle(slots)
    slots += [-1, -1]
    k, v = (
        world.normal(len(slots), att.kv_heads, width, dtype=dtype, scale=scale)
        for width, scale in ((att.head_dim, 1.5), (att.v_head_dim, 1.0))
    )
    k[-2:], v[-2:] = float("nan"), float("nan")
    expected = world.snapshot()
    oracle = OracleLibrary(world.spec)
    ghost = world.cache.pools
    world.cache.pools = {name: torch.from_numpy(flat) for name, flat in expected.items()}
    oracle.append(world.cache, k, v, torch.tensor(slots))
    world.cache.pools = ghost
    cut = len(slots) // 3
    for part in (slice(0, cut), slice(cut, None), slice(0, 0)):
        rows = (world.tensor(x[part]) for x in (k, v))
        world.lib.append(world.cache, *rows, world.ints(slots[part], torch.int64))
    return [
        f"append: {len(at)} bytes of pool {name} differ from the oracle's, first {at[0]}"
        for name, at in world.changed(expected).items()
        if len(at)
    ]


def _gather(world: World, case: Case, table: torch.Tensor, lens: torch.Tensor) -> list[str]:
    oracle, found = OracleLibrary(world.spec), []
    for dtype in {None, FLOATS[case.input]}:
        got = world.lib.gather(world.cache, table, lens, dtype=dtype)
        want = oracle.gather(world.cache, table, lens, dtype=dtype)
        for side, a, b in zip("kv", got, want, strict=True):
            found += differences(f"gather {side}", a, b, 0.0)
    return found


def _attend(world: World, op: str, table: Any, lens: Any, q_starts: Any, starts: Any) -> list[str]:
    """decode or prefill into poisoned outputs, with exactly the workspace it asks for."""
    rows = starts[-1]
    q, outputs = world.query(rows), world.outputs(rows)
    args = (q, world.cache, table, lens, *(() if q_starts is None else (q_starts,)))
    # One thread mostly: two processes of two threads each spend their time waiting for one another.
    threads = 2 if world.seed % 4 == 0 else 1
    nbytes = world.lib.workspace_bytes(op, *args, num_threads=threads)
    workspace = poisoned([max(nbytes, 1)], torch.uint8, world.where, 64)
    got = getattr(world.lib, op)(*args, **outputs, workspace=workspace, num_threads=threads)
    want = OracleLibrary(world.spec).decode(q, world.cache, table, lens, torch.tensor(list(starts)))
    name = f"{op}{'' if q_starts is None else ' of several queries'}"
    return attention(name, got, want, world.spec.attention.q_dtype)


def _merge(world: World, case: Case) -> list[str]:
    """States of every kind: ordinary, empty ones full of NaN, and far apart."""
    att, dtype = world.spec.attention, FLOATS[case.input]
    outs = world.normal(3, 5, att.q_heads, att.v_head_dim, dtype=dtype)
    lses = world.normal(3, 5, att.q_heads, scale=30.0)
    for state, token in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 2), (2, 2)):
        lses[state, token], outs[state, token] = -np.inf, float("nan")
    got = world.lib.merge(outs, lses, **world.outputs(5, dtype))
    return attention("merge", got, OracleLibrary(world.spec).merge(outs, lses), case.input)


def _copy(world: World) -> list[str]:
    ids = world.rng.permutation(world.num_pages)
    half = min(3, len(ids) // 2)
    src, dst = (world.ints([int(i) for i in part]) for part in (ids[:half], ids[half : 2 * half]))
    expected = world.snapshot()
    real, world.cache.pools = world.cache.pools, {n: torch.from_numpy(f) for n, f in expected.items()}
    OracleLibrary(world.spec).copy(world.cache, src, dst)
    world.cache.pools = real
    world.lib.copy(world.cache, src, dst)
    return [
        f"copy: {len(at)} bytes of pool {name} differ from the oracle's, first {at[0]}"
        for name, at in world.changed(expected).items()
        if len(at)
    ]


def wanted_kernels(case: Case) -> list[tuple[str, str]]:
    """The (op, variant) pairs that ``check_case`` launches."""
    q_dtype = case.spec.attention.q_dtype
    gathers = [("gather", dtype) for dtype in sorted({q_dtype, case.input})]
    attend = [("decode", "single"), ("decode", "multi"), ("prefill", "")]
    return [("append", case.input), *gathers, *attend, ("merge", case.input), ("copy", "")]
