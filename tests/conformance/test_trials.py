"""Wrong numbers that trials found: 0 taken for "off", ties of an int8 query, the smallest e8m0 scale.

The expected values are by hand: the oracle had one of these faults too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.ir import Spec
from tests.conformance.conftest import Build
from tests.conformance.test_terms import filled, with_keys
from tests.support.specs import make_spec

OWN_KEY = {
    "window": {"window": 0},
    "window_right": {"causal": False, "window_right": 0},
    "by hand": {"mask": "q_pos - kv_pos <= 0"},
}
PLAIN = make_spec("f32", "f32", kv_heads=1, group=2, page_size=16)


def one_hot(lib: Any, tokens: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A request whose keys are 0 and whose values say which key they belong to."""
    v = torch.zeros(tokens, 1, 64)
    v[range(tokens), 0, range(tokens)] = 1
    return filled(lib, torch.zeros(tokens, 1, 64), v)


@pytest.mark.parametrize("name", OWN_KEY)
def test_a_window_of_0_shows_the_own_key_only(build: Build, name: str) -> None:
    lib = build(with_keys(PLAIN, **OWN_KEY[name]))
    world, table, lens = one_hot(lib, 20)
    q, starts = world.tensor(torch.zeros(20, 2, 64)), world.ints([0, 20])
    eye = torch.eye(20, 64)
    # Causal is on beside window and mask; window_right = 0 shows the keys up to the own one.
    until = torch.tril(torch.ones(20, 20)) / torch.arange(1, 21)[:, None] @ eye
    want = {"window": eye, "window_right": until, "by hand": eye}[name]
    for op in (lib.prefill, lib.decode):
        out, lse = op(q, world.cache, table, lens, starts)
        for head in range(2):
            torch.testing.assert_close(out[:, head].cpu().float(), want, rtol=1e-6, atol=1e-6)
        if name != "window_right":
            assert (lse == 0).all()


@pytest.mark.parametrize("name", ["window", "window_right"])
def test_the_source_for_a_gpu_masks_by_0(name: str) -> None:
    import kvgen

    lib = kvgen.build(with_keys(PLAIN, **OWN_KEY[name]), target="sm_90", tune="off")
    for op in ("decode", "prefill"):
        source = lib.source(op, "multi" if op == "decode" else "")
        assert "key_T[None, :]" in source and "WINDOW" in source


def test_a_window_of_0_is_shown() -> None:
    from kvgen.commands.describe import term_data

    shown = term_data(with_keys(PLAIN, window=0).attention)
    assert ("window", 0) in [(term["key"], term["value"]) for term in shown]


def rounded(fmt: str) -> Spec:
    spec = make_spec(fmt, fmt, kv_heads=1, group=2, page_size=16, q_dtype="bf16")
    return with_keys(spec, qk="int8")


@pytest.mark.parametrize("fmt", ["int8-token", "int4-head", "int4-block"])
def test_ties_of_an_int8_query_go_by_the_reciprocal(build: Build, fmt: str) -> None:
    """An element of amax / 2 is 63.5 units times a reciprocal that is rounded: the code is what that says."""
    lib = build(rounded(fmt))
    keys = torch.zeros(2, 1, 64)
    keys[1, 0, 1] = 1.0
    world, table, lens = filled(lib, keys, torch.ones(2, 1, 64))
    for amax in (1.0, 1.5, 2.5, 3.0, 7.0, 11.0):
        q = torch.zeros(1, 2, 64)
        q[..., 0], q[..., 1] = amax, amax / 2
        step = torch.tensor(amax) / 127
        code = torch.round(torch.tensor(amax / 2) * (1 / step))
        _, lse = lib.decode(world.tensor(q.bfloat16()), world.cache, table, lens, scale=1.0)
        keys_as_stored = lib.gather(world.cache, table, lens, dtype=torch.float32)[0]
        query = torch.tensor([amax, code * step] + [0.0] * 62).double()
        scores = (keys_as_stored.cpu().double() @ query)[:, 0]
        want = torch.logsumexp(scores, 0) / torch.log(torch.tensor(2.0).double())
        assert lse.cpu().double().flatten().tolist() == pytest.approx([float(want)] * 2, rel=2e-4, abs=2e-4)


def test_byte_0_of_a_power_of_two_is_a_number(build: Build) -> None:
    """2 ** -127, as OCP MX has it: a query large enough makes a score of 1 of it."""
    spec = make_spec("f32", "f32", kv_heads=1, group=2, page_size=16)
    raw = spec.to_dict()
    from kvgen.passes.validate import load_spec

    raw["cache"]["k"] = {"format": "mxfp4"}
    lib = build(load_spec(raw))
    world, table, lens = filled(lib, torch.ones(2, 1, 64), torch.ones(2, 1, 64))
    world.cache.planes["k_scale"].zero_()
    keys = lib.gather(world.cache, table, lens, dtype=torch.float32)[0].cpu().double()
    assert (keys > 0).all()
    q = torch.full((1, 2, 64), 2.0**118)
    _, lse = lib.decode(world.tensor(q), world.cache, table, lens, scale=1.0)
    score = float(keys[0, 0].sum() * 2.0**118)
    assert score > 0.1
    want = score / float(torch.log(torch.tensor(2.0))) + 1
    assert lse.flatten().tolist() == pytest.approx([want] * 2, rel=1e-5)
    world.cache.planes["k_scale"].fill_(255)
    assert lib.gather(world.cache, table, lens, dtype=torch.float32)[0].isnan().all()
    assert lib.decode(world.tensor(q), world.cache, table, lens, scale=1.0)[1].isnan().all()
