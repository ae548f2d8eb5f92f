"""One attention call of a library in a poisoned world, and the oracle's answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvgen import reference
from kvgen.ir import Spec
from kvgen.passes.validate import validate
from kvgen.reference.rope import rope_table
from kvgen.variants import positions
from kvgen.variants.samples import sample_params
from tests.support.oracle import OracleLibrary, to_numpy
from tests.support.specs import make_spec
from tests.support.world import World

State = tuple[torch.Tensor, torch.Tensor]


def spec_with(base: dict[str, Any] | None = None, **attention: Any) -> Spec:
    """Four query and two KV heads of 32 in f32, with these keys of [attention]."""
    raw = make_spec(**{"kv_heads": 2, "group": 2, "head_dim": 32, "page_size": 8} | (base or {})).to_dict()
    raw["attention"] |= attention
    return validate(raw)


def params_for(spec: Spec, lens: Sequence[int], starts: Sequence[int], seed: int = 7) -> dict[str, Any]:
    """Hard but legal parameters of an attention call as numpy arrays, angles included where it turns K."""
    found = sample_params(spec, kv_lens=lens, q_starts=starts, rng=np.random.default_rng(seed))
    rope = spec.attention.rope
    if rope is not None and rope.stored == "pre":
        found["rope_table"] = rope_table(*positions()[rope.kind].frequencies(rope), max(lens) + 1)
    return found


def attend(
    lib: Any,
    op: str,
    lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    params: dict[str, Any] | None = None,
    seed: int = 0,
) -> tuple[State, State]:
    """What ``lib`` and what the oracle say; one query a request where ``q_lens`` is None."""
    spec = lib.spec
    world = World(lib, sum(-(-n // spec.cache.page_size) for n in lens) + 3, seed=seed)
    table = world.table(lens)
    slots = world.slots(table, lens)
    att = spec.attention
    k, v = (world.normal(len(slots), att.kv_heads, width) for width in (att.head_dim, att.v_head_dim))
    OracleLibrary(spec).append(world.cache, k, v, torch.tensor(slots))
    starts = [0, *accumulate(q_lens or [1] * len(lens))]
    q = world.query(starts[-1])
    given = params_for(spec, lens, starts) if params is None else params
    tensors = {name: world.tensor(torch.from_numpy(array)) for name, array in given.items()}
    ragged = () if q_lens is None else (world.ints(starts),)
    call = (q, world.cache, table, world.ints(lens), *ragged)
    got = getattr(lib, op)(*call, **world.outputs(starts[-1]), params=tensors or None)
    want = reference.decode(
        spec, world.record, world.bytes, world.num_pages, table.numpy(), np.array(lens), to_numpy(q),
        np.array(starts), scales=None, params=given,
    )  # fmt: skip
    return got, (torch.from_numpy(want[0]), torch.from_numpy(want[1]))
