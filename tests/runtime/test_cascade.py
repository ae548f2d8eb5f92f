"""cascade: what decode over the prefix's pages followed by each request's own would give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.passes.validate import load_spec
from kvgen.reference.attend import attend
from kvgen.reference.terms import Terms
from tests.support.compare import attention as differences
from tests.support.engines import engine_params, library
from tests.support.world import World

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 4


def spec(q_dtype: str = "f32", cache: dict[str, Any] | None = None, **attention: Any) -> Any:
    sides = {side: {"format": q_dtype} for side in ("k", "v")} | (cache or {})
    return load_spec(
        {
            "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "q_dtype": q_dtype, **attention},
            "cache": {"page_size": PAGE, "layout": "page kv head tok d", **sides},
        }
    )


PLAIN = spec()
SPECS = {
    "plain": PLAIN,
    "full": spec(causal=False),
    "sink, soft cap and scale": spec(soft_cap=2.0, head_scale=True, sink_logit=True),
    "latent": spec(cache={"v": {"alias": "k"}}, kv_heads=1, head_dim=48, v_head_dim=32),
}
RAGGED = (5, 0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 2)
"""Keys of each request after the prefix."""


class Shared:
    """Requests on poisoned pages: ``prefix`` keys that all share, then ``lens`` of their own."""

    def __init__(self, lib: Any, prefix: int, lens: Sequence[int], rows: Sequence[int] | None = None) -> None:
        att = lib.spec.attention
        self.lib, self.prefix = lib, prefix
        self.world = World(lib, 40)
        every = [prefix, *lens]
        table = self.world.table(every)
        slots = self.world.slots(table, every)
        k, v = (self.world.normal(len(slots), att.kv_heads, n) for n in (att.head_dim, att.v_head_dim))
        if att.q_dtype == "bf16":  # as they are stored
            k, v = k.bfloat16().float(), v.bfloat16().float()
        own = None if lib.spec.cache.alias else v
        lib.append(self.world.cache, k, own, self.world.ints(slots, torch.int64))
        ends = np.cumsum(every)
        seen = (k, k[..., : att.v_head_dim]) if lib.spec.cache.alias else (k, v)
        self.k, self.v = (np.split(x.numpy(), ends[:-1]) for x in seen)
        self.rows = [1] * len(lens) if rows is None else list(rows)
        self.starts = [0, *np.cumsum(self.rows).tolist()]
        self.q = self.world.query(self.starts[-1], 2.0)
        heads = {"head_scale": (0.5, 1.5), "sink_logit": (-2.0, 2.0)}
        self.params = {
            p.name: torch.linspace(*heads[p.name], att.q_heads) for p in att.params if p.name in heads
        } or None
        self.given = (
            self.q,
            self.world.cache,
            self.world.tensor(table[0]),
            prefix,
            self.world.tensor(table[1:]),
            self.world.ints(lens),
            None if rows is None else self.world.ints(self.starts),
        )

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lib.cascade(*self.given, **({"params": self.params} | options))

    def exact(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 attention over the keys of the prefix and of each request, one after another."""
        att = self.lib.spec.attention
        k, v = ([np.concatenate([side[0], own]) for own in side[1:]] for side in (self.k, self.v))
        terms = Terms(att, {name: t.numpy() for name, t in (self.params or {}).items()})
        q = self.q.float().numpy()
        found = attend(q, k, v, q_starts=self.starts, scale=att.scale, terms=terms, **options)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    def check(self, got: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
        found = differences("cascade", got, self.exact(**options), self.lib.spec.attention.q_dtype)
        assert not found, found


@pytest.mark.parametrize("prefix", [0, 1, PAGE, 2 * PAGE + 3])
@pytest.mark.parametrize("name", SPECS)
def test_ragged_requests_of_one_query(name: str, prefix: int) -> None:
    shared = Shared(library("portable", SPECS[name]), prefix, RAGGED)
    shared.check(shared.run())


@pytest.mark.parametrize("name", SPECS)
def test_ragged_requests_of_several_queries(name: str) -> None:
    """Of as many queries as keys, one more (the first stands on the prefix's last key), fewer, or none."""
    shared = Shared(library("portable", SPECS[name]), 2 * PAGE + 3, RAGGED, (5, 1, 2, 3, 0, 1, 8))
    shared.check(shared.run())


@pytest.mark.parametrize("engine", engine_params(("avx512-bf16", "avx2", "portable")))
def test_states_of_bf16(engine: str) -> None:
    shared = Shared(library(engine, spec("bf16")), 2 * PAGE + 3, RAGGED)
    shared.check(shared.run())


@pytest.mark.parametrize("engine", engine_params(("avx512-bf16", "interpret")))
def test_many_queries_meet_the_prefix_in_prefill(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where it multiplies faster, unless there are fewer heads than threads."""
    one_head = spec("bf16", sink_logit=True, kv_heads=1)
    shared = Shared(library(engine, one_head), PAGE + 3, (5, 0, PAGE), (4, 1, 4))
    ran: list[tuple[str, str]] = []
    run = shared.lib._run

    def noted(op: str, variant: str, *rest: Any) -> Any:
        ran.append((op, variant))
        return run(op, variant, *rest)

    monkeypatch.setattr(shared.lib, "_run", noted)
    for threads, op in ((1, "prefill"), (2, "decode")):
        shared.check(shared.run(num_threads=threads))
        assert ran.pop(0) == (op, "prefix") and ran.pop()[1] == "multi"


def test_the_interpreted_kernels_agree() -> None:
    shared = Shared(library("interpret", SPECS["sink, soft cap and scale"]), PAGE + 3, (5, 0, PAGE))
    shared.check(shared.run())


def test_a_decode_of_the_same_tensors_stays_causal() -> None:
    """Calls of known shapes are repeated by their tensors: the prefix's must not stand in for decode's."""
    shared = Shared(library("portable", PLAIN), 2 * PAGE + 3, (6,), (6,))
    q, cache, prefix, length, _, _, starts = shared.given
    want = attend(q.numpy(), shared.k[:1], shared.v[:1], q_starts=shared.starts, scale=0.25)
    for _ in range(3):
        shared.check(shared.run())
        own = shared.lib.decode(q, cache, prefix[None], shared.world.ints([length]), starts)
        assert not differences("decode", own, tuple(map(torch.from_numpy, want)), "f32")


def test_no_request() -> None:
    shared = Shared(library("portable", PLAIN), 9, ())
    out, lse = shared.run()
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


def test_an_unfinished_state_has_no_sink() -> None:
    shared = Shared(library("portable", SPECS["sink, soft cap and scale"]), 9, RAGGED)
    shared.check(shared.run(finalize=False), finalize=False)
    assert not torch.allclose(shared.run(finalize=False)[1], shared.run()[1])


def test_a_length_in_a_tensor_and_a_scale_of_the_call() -> None:
    shared = Shared(library("portable", PLAIN), 2 * PAGE + 3, RAGGED)
    want = shared.run()
    given = list(shared.given)
    given[3] = shared.world.ints([shared.prefix])
    assert all(torch.equal(a, b) for a, b in zip(shared.lib.cascade(*given), want, strict=True))
    assert not torch.allclose(shared.run(scale=0.01)[0], want[0])


@pytest.mark.parametrize("name", ["plain", "sink, soft cap and scale"])
def test_nothing_is_allocated_when_everything_is_given(name: str) -> None:
    shared = Shared(library("portable", SPECS[name]), 2 * PAGE + 3, RAGGED, (5, 1, 2, 3, 0, 1, 8))
    nbytes = shared.lib.cascade_workspace_bytes(*shared.given, params=shared.params)
    given = shared.world.outputs(len(shared.q)) | {"workspace": torch.empty(nbytes, dtype=torch.uint8)}
    seen: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    shared.run()  # the sink of no weight is made once
    with Listen():
        got = shared.run(**given)
    assert got[0] is given["out"] and got[1] is given["lse"]
    assert "aten.fill_.Scalar" in seen
    makers = ("empty", "zeros", "full", "clone", "copy", "contiguous", "cat")
    assert not [name for name in seen if any(word in name for word in makers)]
    shared.check(got)


def test_a_workspace_one_byte_short_is_refused() -> None:
    shared = Shared(library("portable", PLAIN), 2 * PAGE + 3, RAGGED)
    nbytes = shared.lib.cascade_workspace_bytes(*shared.given)
    with pytest.raises(ArgumentError, match=f"workspace: {nbytes - 1} bytes, but this call needs {nbytes}"):
        shared.run(workspace=torch.empty(nbytes - 1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("attention", "cache", "match"),
    [
        ({"window": 8}, {}, "attention.window"),
        ({"alibi": True}, {}, "attention.alibi"),
        ({"chunk": 8}, {}, "attention.chunk"),
        ({"rope": {"stored": "pre"}}, {}, 'attention.rope.stored = "pre"'),
    ],
    ids=["window", "alibi", "chunk", "rope"],
)
def test_specs_whose_prefix_has_positions_are_refused(
    attention: dict[str, Any], cache: dict[str, Any], match: str
) -> None:
    lib = library("portable", spec(cache=cache, **attention))
    given = (torch.zeros(1, 4, 16), lib.new_cache(2), torch.tensor([0], dtype=torch.int32), 1)
    with pytest.raises(UnsupportedError, match=match):
        lib.cascade(*given, torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (
            2,
            torch.tensor([0, 99, 1], dtype=torch.int32),
            r"prefix_table\[1\] = 99: the pool has pages 0",
        ),
        (2, torch.tensor([[0, 1, 2]], dtype=torch.int32), "prefix_table: shape"),
        (2, torch.tensor([0, 1, 2]), r"prefix_table: dtype int64, not int32; use \.int"),
        (3, 13, "prefix_len = 13: give 0 to 12"),
        (3, -1, "prefix_len = -1"),
        (3, 1.5, r"prefix_len = 1\.5"),
        (3, torch.tensor([13], dtype=torch.int32), "prefix_len = 13"),
        (3, torch.tensor(13), "prefix_len: dtype int64"),
        (5, torch.tensor([5, 0], dtype=torch.int32), r"kv_lens: shape \(2,\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, int | float) else "",
)
def test_arguments_that_are_refused(at: int, value: Any, match: str) -> None:
    shared = Shared(library("portable", PLAIN), 2 * PAGE + 3, RAGGED)
    given = list(shared.given)
    given[2] = given[2][:3]
    given[at] = value
    with pytest.raises(ArgumentError, match=match):
        shared.lib.cascade(*given)


def test_queries_within_the_prefix_are_refused() -> None:
    shared = Shared(library("portable", PLAIN), 9, (4, 1), (4, 3))
    with pytest.raises(ArgumentError, match=r"kv_lens\[1\] = 1: request 1 has 3 queries"):
        shared.run()
    whole = Shared(library("portable", SPECS["full"]), 9, (4, 1), (4, 3))
    whole.check(whole.run())


def test_outputs_that_overlap_are_refused() -> None:
    shared = Shared(library("portable", PLAIN), 9, (4, 4))
    workspace = torch.empty(shared.lib.cascade_workspace_bytes(*shared.given), dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="workspace"):
        shared.run(out=workspace[: 2 * 4 * 16 * 4].view(torch.float32).view(2, 4, 16), workspace=workspace)
    with pytest.raises(ArgumentError, match="out"):
        shared.run(out=shared.q)
