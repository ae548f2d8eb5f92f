"""Decode over panels of keys on the widest row of the CPU: every form of K and V that the plan knows.

All kernels compile in one translation unit; each test is a few launches.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.ir import Spec
from tests.support.bundle import prepare
from tests.support.compare import TOLERANCE, attention, differences
from tests.support.engines import cpu_library
from tests.support.guard import run_guarded
from tests.support.oracle import OracleLibrary
from tests.support.specs import make_spec
from tests.support.world import World, poisoned

ROW = "avx512-bf16-vnni"
LENS = [700, 3, 0, 129, 64, 1, 15, 16, 17]
Q_LENS = [5, 3, 2, 8, 1, 1, 4, 0, 2]

pytestmark = [pytest.mark.isa("avx512"), pytest.mark.isa("bf16"), pytest.mark.isa("vnni")]


def int8_arithmetic(spec: Spec) -> Spec:
    """The same spec with queries and weights of 8 bits."""
    return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, qk="int8", pv="int8"))


def same(fmt: str, layout: str, q_dtype: str, **more: Any) -> Spec:
    return make_spec(fmt, fmt, layout=layout, q_dtype=q_dtype, kv_heads=2, **more)


SPECS = {
    "bf16": same("bf16", "pairs", "bf16", group=4, head_dim=72),
    "bf16-window": same("bf16", "pairs", "bf16", group=3, page_size=32, mask=(True, 33)),
    "f16": same("f16", "columns", "f16", group=4, head_dim=128),
    "f32": same("f32", "columns", "f32", group=1, page_size=64),
    "e4m3": same("e4m3-token", "columns", "bf16", group=4),
    "int8": same("int8-token", "quads", "f16", group=4, head_dim=128, mask=(True, 100)),
    "int8-head": same("int8-head", "quads", "bf16", group=5, page_size=48, mask=(False, None)),
    "int8-block": same("int8-block", "quads", "bf16", group=4),
    "int8-fast": int8_arithmetic(same("int8-token", "quads", "bf16", group=4, head_dim=128)),
    "int4": same("int4-token", "quads", "bf16", group=8, page_size=128),
    "int4-block": same("int4-block", "quads", "bf16", group=4, head_dim=96),
    "int4-tail": same("int4-token", "quads", "bf16", group=3, head_dim=72),
    "int4-fast": int8_arithmetic(same("int4-token", "quads", "bf16", group=4, head_dim=128)),
}
"""What meets what: bf16 pairs; f32 lanes; int8 quads with two digits and with one; int4 as two operands."""


@pytest.fixture(scope="module")
def libraries() -> dict[str, Any]:
    """A library for each of ``SPECS``, with decode in splits of 256 keys."""
    found = {name: cpu_library(spec, ROW, {"decode": {"split_tokens": 256}}) for name, spec in SPECS.items()}
    prepare((lib, [("decode", "single"), ("decode", "multi")]) for lib in found.values())
    return found


class Scene:
    """A cache that the oracle filled, a page table and queries."""

    def __init__(self, lib: Any, lens: list[int] = LENS, q_lens: list[int] = Q_LENS, seed: int = 0) -> None:
        page, att = lib.spec.cache.page_size, lib.spec.attention
        self.lib, self.lens, self.seed = lib, lens, seed
        self.world = World(lib, sum(-(-n // page) for n in lens) + 3, seed=seed)
        self.table = self.world.table(lens)
        self.slots = self.world.slots(self.table, lens)
        self.k, self.v = (
            self.world.normal(len(self.slots), att.kv_heads, width)
            for width in (att.head_dim, att.v_head_dim)
        )
        self.starts = [0, *accumulate(q_lens)]
        self.q = self.world.query(self.starts[-1])

    def fill(self) -> None:
        """Append K and V; everything else in the pools is poison."""
        OracleLibrary(self.lib.spec).append(self.world.cache, self.k, self.v, torch.tensor(self.slots))

    def run(self, requests: list[int], single: bool = False, threads: int = 1, lib: Any = None) -> Any:
        """Out and lse of some requests; ``single``: of the first query of each."""
        rows = [
            [self.starts[b]] if single else list(range(self.starts[b], self.starts[b + 1])) for b in requests
        ]
        q = self.world.tensor(self.q[[i for part in rows for i in part]])
        args = [
            q,
            self.world.cache,
            self.table[requests].contiguous(),
            self.world.ints(self.lens[b] for b in requests),
        ]
        if not single:
            args.append(self.world.ints([0, *accumulate(map(len, rows))]))
        if lib is not None:
            return lib.decode(*args)
        nbytes = self.lib.workspace_bytes("decode", *args, num_threads=threads)
        workspace = poisoned([max(nbytes, 1)], torch.uint8, self.world.where, 64)
        return self.lib.decode(*args, **self.world.outputs(len(q)), workspace=workspace, num_threads=threads)


def wrong(scene: Scene, everybody: list[int]) -> list[str]:
    """What differs from the oracle, for one query a request and for several."""
    att, found = scene.lib.spec.attention, []
    for single in (True, False):
        got = scene.run(everybody, single)
        want = scene.run(everybody, single, lib=OracleLibrary(scene.lib.spec))
        if att.qk == "exact":
            found += attention("one" if single else "several", got, want, att.q_dtype)
        else:  # the query is rounded to 1/127 and weights to 1/255 of the largest
            found += differences("out", got[0], want[0], 3 * TOLERANCE["bf16"])
            found += differences("lse", got[1], want[1], 3e-2)
    return found


@pytest.mark.parametrize("name", list(SPECS))
def test_panels_give_what_the_oracle_gives(libraries: dict[str, Any], name: str) -> None:
    scene = Scene(libraries[name])
    scene.fill()
    run = run_guarded(lambda: wrong(scene, list(range(len(LENS)))), timeout_s=120)
    assert run.ok, f"died by {run.signal}: touched forbidden memory\n{run.error}"
    assert not run.value, "\n".join(run.value)


@pytest.mark.parametrize("name", ["bf16", "f16", "int8", "int8-fast", "int4-fast", "int4-block"])
def test_bits_do_not_depend_on_batch_or_threads(libraries: dict[str, Any], name: str) -> None:
    scene = Scene(libraries[name])
    scene.fill()
    everybody = [b for b, rows in enumerate(Q_LENS) if rows]
    for single in (True, False):
        alone = {b: scene.run([b], single) for b in everybody}
        for requests, threads in ((everybody, 1), (everybody[::-1], 2)):
            got, at = scene.run(requests, single, threads), 0
            for b in requests:
                count = 1 if single else Q_LENS[b]
                for have, want in zip(got, alone[b], strict=True):
                    assert torch.equal(have[at : at + count], want), f"request {b} in {requests}"
                at += count


@pytest.mark.parametrize("name", ["bf16", "f32", "int8", "int8-fast", "int4-block"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_those_who_see_it(
    libraries: dict[str, Any], name: str, value: float
) -> None:
    """One element of K or V of a late key of request 0: only rows that see the key, and none of others."""
    scene = Scene(libraries[name], [130, 40], [4, 2], seed=3)
    for side in ("k", "v") if np.isnan(value) else ("v",):  # a score of -inf takes no part, as it should
        scene.fill()
        before = scene.run([0, 1])
        spoiled = getattr(scene, side).clone()
        spoiled[scene.slots.index(scene.slots[128]), 1, 3] = value  # key 128: queries 0 and 1 do not see it
        tensors = {"k": scene.k, "v": scene.v, side: spoiled}
        OracleLibrary(scene.lib.spec).append(
            scene.world.cache, tensors["k"], tensors["v"], torch.tensor(scene.slots)
        )
        out, lse = scene.run([0, 1])
        group = scene.lib.spec.attention.group
        sees = np.zeros((6, 2 * group), dtype=bool)
        sees[2:4, group:] = True
        clean = torch.from_numpy(~sees)
        assert torch.equal(out[clean], before[0][clean]) and torch.equal(lse[clean], before[1][clean])
        assert not out[torch.from_numpy(sees)].isfinite().all(-1).any()


@pytest.mark.parametrize("name", ["bf16", "int8", "int8-fast", "int4"])
def test_a_query_that_is_not_finite_spoils_its_own_row(libraries: dict[str, Any], name: str) -> None:
    scene = Scene(libraries[name], [130, 40], [4, 2], seed=4)
    scene.fill()
    before = scene.run([0, 1])
    scene.q[1, 2, 5] = float("nan")
    out, lse = scene.run([0, 1])
    clean = torch.ones(out.shape[:2], dtype=torch.bool)
    clean[1, 2] = False
    assert torch.equal(out[clean], before[0][clean]) and torch.equal(lse[clean], before[1][clean])
    assert out[1, 2].isnan().all() and lse[1, 2].isnan()
