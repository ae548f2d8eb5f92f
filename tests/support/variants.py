"""Specs with masks, scores, sinks, rope and a V inside K, and a check of every op of one against the oracle.

``check_variant`` returns what is wrong as text, as ``cases.check_case`` does, so that one batch of kernels
reports all of its faults at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvgen import reference
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.tune.check_bytes import exactly_read
from kvgen.variants import definitions, positions
from kvgen.variants.samples import sample_params
from tests.support.compare import attention, differences
from tests.support.oracle import OracleLibrary, known, to_numpy
from tests.support.specs import make_spec
from tests.support.world import Where, World, poisoned

ROPES: dict[str, dict[str, Any] | None] = {
    "no rope": None,
    "half": {"kind": "default"},
    "interleaved": {"kind": "linear", "pairing": "interleaved", "dim": 16},
    "pre half": {"kind": "yarn", "stored": "pre", "dim": 16},
    "pre interleaved": {"kind": "llama3", "stored": "pre", "pairing": "interleaved"},
}
"""Name -> [attention.rope], without the scheme's own keys."""
MASKS = ("causal", *(d.name for d in definitions("mask") if d.name != "causal"))
"""Registered masks; ``causal`` stands for no other."""
SCORES = ("plain", *(d.name for d in definitions("score")))


def variant_spec(
    mask: str = "causal",
    score: str = "plain",
    sink: bool = False,
    rope: str = "no rope",
    alias: bool = False,
    **shape: Any,
) -> Spec:
    """``make_spec(**shape)`` with terms of these names, each as its definition's example shows it."""
    known = {d.name: d for d in definitions()}
    keys: dict[str, Any] = {}
    for name in (mask, score, *(("sink_logit",) if sink else ())):
        keys |= known[name].example if name in known else {}
    raw = make_spec(**shape).to_dict()
    table = ROPES[rope]
    if table is not None:
        keys["rope"] = {**table, **positions()[table["kind"]].example}
    att = {key: value for key, value in raw["attention"].items() if key != "v_head_dim" or not alias}
    cache = raw["cache"]
    if alias:
        att["v_head_dim"] = raw["attention"]["head_dim"] - 16
        cache = {**cache, "v": {"alias": "k"}}
        if "layout" in raw["cache"]["v"]:  # an override of V's axes had one of K's beside it
            cache["k"] = {key: value for key, value in cache["k"].items() if key != "layout"}
    words = [mask, score, *(["sink"] * sink), rope, *(["alias"] * alias), raw["name"]]
    name = "-".join(words).replace(" ", "-")
    return load_spec({"name": name[:100], "attention": {**att, **keys}, "cache": cache})


@dataclass(frozen=True)
class VariantCase:
    """What the kernels of a spec are shown. ``most`` bounds the keys, ``most_q`` the queries of a request."""

    spec: Spec
    seed: int = 0
    where: Where = "end"
    most: int = 300
    most_q: int = 40
    batch: int = 4

    def kv_lens(self) -> list[int]:
        """Lengths around every edge of a page, and long ones; which come first depends on the seed."""
        page = self.spec.cache.page_size
        ragged = [self.most, page + 1, 0, 97, 1, page, 54, page - 1, self.most // 2]
        return [min(self.most, ragged[(self.seed + b) % len(ragged)]) for b in range(self.batch)]

    def q_lens(self, choices: tuple[int, ...]) -> list[int]:
        """Queries of each request; some have more queries than keys."""
        return [min(self.most_q, choices[(self.seed + b) % len(choices)]) for b in range(self.batch)]


def check_variant(lib: Any, case: VariantCase, *, gather: bool = False) -> list[str]:
    """append, decode, prefill and (with a sink) merge of ``lib`` on the case, and ``gather`` where asked; all
    that is wrong."""
    lens, spec = case.kv_lens(), case.spec
    pages = sum(-(-n // spec.cache.page_size) for n in lens) + 2
    world = World(lib, pages, where=case.where, seed=case.seed, raw_rows=pages)
    table = world.table(lens)
    wrong = _append(world, table, lens) if spec.cache.raw is None else _append_requests(world, table, lens)
    if gather:
        wrong += _gather(world, table, lens)
    before = world.snapshot()
    single = list(range(len(lens) + 1))
    wrong += _attend(world, "decode", table, lens, single, ragged=False)
    for op, choices in (("decode", (1, 5, 3, 8, 2, 0)), ("prefill", (1, 17, 37, 3, 40))):
        starts = [0, *accumulate(case.q_lens(choices))]
        wrong += _attend(world, op, table, lens, starts, ragged=True)
    for name, at in world.changed(before).items():
        wrong += [f"readers changed {len(at)} bytes of pool {name}, first {at[0]}"] if len(at) else []
    return wrong


def angles(spec: Spec, count: int) -> np.ndarray | None:
    """The table of angles of so many positions; None without rope."""
    rope = spec.attention.rope
    if rope is None:
        return None
    return reference.rope_table(*positions()[rope.kind].frequencies(rope), count)


def placed(world: World, params: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Parameters as tensors whose buffers touch a guard page."""
    return {name: world.tensor(torch.from_numpy(values)) for name, values in params.items()}


def _append(world: World, table: torch.Tensor, lens: list[int]) -> list[str]:
    """Random rows in a random order, in two appends; every byte of the pools as the oracle leaves it."""
    att, spec = world.spec.attention, world.spec
    rows, size = table.tolist(), spec.cache.page_size
    where = [(rows[b][t // size] * size + t % size, t) for b, n in enumerate(lens) for t in range(n)]
    world.rng.shuffle(where)
    where += [(-1, 0)]
    k, v = (world.normal(len(where), att.kv_heads, width) for width in (att.head_dim, att.v_head_dim))
    slots, at = (np.array(column, np.int64) for column in zip(*where, strict=True))
    given: dict[str, Any] = {}
    turned: dict[str, Any] = {}
    if att.rope is not None and att.rope.stored == "post":
        table_of = angles(spec, max(lens, default=1) + 1)
        given = {"positions_T": at, "params": {"rope_table": table_of}}
        turned = {"params": placed(world, {"rope_table": table_of})}
    expected = world.snapshot()
    values = None if spec.cache.alias else v.numpy()
    reference.append(
        spec, world.record, expected, world.num_pages, k.numpy(), values, slots,
        **known(world.cache), **given,
    )  # fmt: skip
    cut = len(slots) // 3
    for part in (slice(0, cut), slice(cut, None)):
        call: list[Any] = [world.tensor(k[part]), None if spec.cache.alias else world.tensor(v[part])]
        call.append(world.ints(slots[part].tolist(), torch.int64))
        if turned:
            call.append(world.ints(at[part].tolist()))
        world.lib.append(world.cache, *call, **turned)
    return _differing(world, expected)


def _append_requests(world: World, table: torch.Tensor, lens: list[int]) -> list[str]:
    """Random rows in two appends by requests, cut anywhere; every byte as the oracle leaves it."""
    att, spec = world.spec.attention, world.spec
    cuts = [int(world.rng.integers(0, n + 1)) for n in lens]
    world.hold_raw(table, lens, cuts)
    post = att.rope is not None and att.rope.stored == "post"
    table_of = {"rope_table": angles(spec, max(lens, default=1) + 1)} if post else {}
    expected = world.snapshot()
    for old, new in ((lens, cuts), (cuts, lens)):
        starts = [0, *accumulate(n - (old[b] if new is lens else 0) for b, n in enumerate(new))]
        k, v = (world.normal(starts[-1], att.kv_heads, width) for width in (att.head_dim, att.v_head_dim))
        v = None if spec.cache.alias else v
        reference.append_requests(
            spec, world.record, expected, world.num_pages, k.numpy(), None if v is None else v.numpy(),
            table.numpy(), new, starts, **known(world.cache), params=table_of or None,
        )  # fmt: skip
        tables = {"page_table": table, "kv_lens": world.ints(new), "q_starts": world.ints(starts)}
        world.lib.append(world.cache, k, v, **tables, params=placed(world, table_of) or None)
    return _differing(world, expected)


def _differing(world: World, expected: Mapping[str, np.ndarray]) -> list[str]:
    """Bytes of all pools against what an append of the oracle left."""
    return [
        f"append: {len(found)} bytes of pool {name} differ from the oracle's, first {found[0]}"
        for name, found in world.changed(expected).items()
        if len(found)
    ]


def _gather(world: World, table: torch.Tensor, lens: list[int]) -> list[str]:
    """The values of all requests, as f32. Those that were rotated back have added up in another order."""
    got = world.lib.gather(world.cache, table, world.ints(lens), dtype=torch.float32)
    want = OracleLibrary(world.spec).gather(world.cache, table, world.ints(lens), dtype=torch.float32)
    found = []
    for side, a, b in zip("kv", got, want, strict=True):
        exact = exactly_read(world.spec.cache.quant(side))
        found += differences(f"gather {side}", a, b, 0.0 if exact else 2e-6)
    return found


def _attend(
    world: World, op: str, table: torch.Tensor, lens: list[int], starts: list[int], *, ragged: bool
) -> list[str]:
    """One call into poisoned outputs; with a sink also unfinished, and merged with an empty state."""
    spec, rows = world.spec, starts[-1]
    q, outputs = world.query(rows), world.outputs(rows)
    params = sample_params(spec, kv_lens=lens, q_starts=starts, rng=world.rng)
    table_of = angles(spec, max(lens, default=1) + 1)
    if spec.attention.rope is not None and spec.attention.rope.stored == "pre":
        params["rope_table"] = table_of
    given = placed(world, params)
    args = (q, world.cache, table, world.ints(lens), *((world.ints(starts),) if ragged else ()))
    threads = 2 if world.seed % 4 == 0 else 1
    nbytes = world.lib.workspace_bytes(op, *args, params=given, num_threads=threads)
    workspace = poisoned([max(nbytes, 1)], torch.uint8, world.where, 64)
    call = getattr(world.lib, op)
    got = call(*args, **outputs, params=given, workspace=workspace, num_threads=threads)

    def oracle(*, finalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        found = reference.prefill(
            spec, world.record, world.bytes, world.num_pages, table.numpy(), lens, to_numpy(q), starts,
            **known(world.cache), params=params, finalize=finalize,
        )  # fmt: skip
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    name = f"{op}{' of several queries' if ragged else ''}"
    dtype = spec.attention.q_dtype
    wrong = attention(name, got, oracle(finalize=True), dtype)
    if spec.attention.sink:
        state = call(*args, **world.outputs(rows), params=given, finalize=False)
        wrong += attention(f"{name}, unfinished", state, oracle(finalize=False), dtype)
        outs = torch.stack([state[0], torch.full_like(state[0], float("nan"))])
        lses = torch.stack([state[1], torch.full_like(state[1], -np.inf)])
        merged = world.lib.merge(outs, lses, params={"sink_logit": given["sink_logit"]})
        wrong += attention(f"{name}, merged", merged, oracle(finalize=True), dtype)
    return wrong


def wanted_kernels(case: VariantCase) -> list[tuple[str, str]]:
    """The (op, variant) pairs that ``check_variant`` launches."""
    att = case.spec.attention
    merge = [("merge", att.q_dtype)] if att.sink else []
    return [("append", "f32"), ("decode", "single"), ("decode", "multi"), ("prefill", ""), *merge]
