"""Tokens of a request depend on its own options: not on who else runs, fails, forks or gives way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.passes.validate import load_spec
from kvgen.runtime import Engine
from kvgen.runtime.sampling import Greedy, Sampled
from tests.support.specs import make_spec
from tests.support.tiny_engine import COUNT, PROMPTS, exact, new_engine, run, tokens
from tests.support.tiny_model import TinyModel, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


def kivi() -> Any:
    raw = make_spec("f32", "f32", page_size=16, kv_heads=2, group=2, head_dim=16).to_dict()
    raw["cache"] |= {
        "keep_first": 2,
        "keep_last": 16,
        "k": {"format": "int2", "affine": True, "group": {"head": 1, "tok": 16, "d": 1}},
        "v": {"format": "int2", "affine": True, "group": {"head": 1, "tok": 1}},
    }
    return load_spec(raw)


def said(engine: Engine, given: list[list[int]], sampling: Any = Greedy()) -> list[list[int]]:  # noqa: B008
    ids = [engine.add(prompt, max_new_tokens=COUNT, sampling=sampling) for prompt in given]
    events = list(run(engine))
    return [tokens(events, i) for i in ids]


def test_company_and_preemption_change_no_token_of_a_cache_with_raw_tokens() -> None:
    """Two bits for a number: what a query sees as codes decides its token."""
    spec, given = kivi(), prompts(50, 33, 47, 16, 21, 64, 5, 40, 31, 18, 55, 27)
    options: dict[str, Any] = {
        "spec": spec,
        "chunk": 16,
        "max_batch": 8,
        "model": TinyModel(spec, max_positions=96),
    }
    alone = [said(new_engine(**options), [prompt])[0] for prompt in given]
    assert said(new_engine(**options), given) == alone
    assert said(new_engine(**options | {"chunk": 31}), given) == alone, "31 holds one block too"
    tight = new_engine(14, **options)
    ids = [tight.add(prompt, max_new_tokens=COUNT) for prompt in given]
    events = list(run(tight))
    assert sum(event.kind == "preempted" for event in events) >= 2
    assert [tokens(events, i) for i in ids] == alone
    rough = make_spec("f32", "f32", page_size=16, kv_heads=2, group=2, head_dim=16)
    assert said(new_engine(model=TinyModel(rough, max_positions=96), spec=rough), given) != alone, (
        "the codes are too good to tell"
    )


def test_a_fork_of_raw_tokens_that_waits_says_what_one_that_runs_says() -> None:
    found = []
    for most in (1, 4):
        engine = new_engine(spec=kivi(), chunk=16, max_batch=most, model=TinyModel(kivi(), max_positions=96))
        parent = engine.add(prompts(40)[0], max_new_tokens=2 * COUNT)
        events = [event for _ in range(8) for event in engine.step()]
        child = engine.fork(parent)
        events += run(engine)
        found.append((tokens(events, parent), tokens(events, child)))
    assert found[0] == found[1]


def test_a_request_of_nan_ends_alone() -> None:
    class Nan(TinyModel):
        def forward(self, step: Any, layers: Any) -> torch.Tensor:
            logits = super().forward(step, layers)
            starts = step.last_rows_S.tolist()
            bad = [at for at, row in enumerate(starts) if int(step.tokens_T[row]) == exact()[1][3]]
            logits[bad] = torch.nan
            return logits

    engine = new_engine(model=Nan())
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events = list(run(engine))
    ended = {event.request: event for event in events if event.kind == "finished"}
    assert ended[ids[1]].reason == "error" and "nan" in ended[ids[1]].detail
    for i, want in zip(ids, exact(), strict=True):
        if exact()[1][3] not in want[:-1]:
            assert ended[i].reason == "length" and tokens(events, i) == want
        else:
            assert ended[i].reason == "error" and tokens(events, i) == want[: want.index(exact()[1][3]) + 1]


def test_each_request_draws_its_own_numbers() -> None:
    how = Sampled(2.0)
    twice = said(new_engine(), [PROMPTS[3], PROMPTS[3]], how)
    assert twice[0] != twice[1]
    assert said(new_engine(), [PROMPTS[3]], how)[0] == twice[0], "the first of an engine, alone or not"
    assert said(new_engine(seed=1), [PROMPTS[3]], how)[0] != twice[0]
    same = said(new_engine(), [PROMPTS[3], PROMPTS[0], PROMPTS[3]], Sampled(2.0, seed=5))
    assert same[0] == same[2] == said(new_engine(), [PROMPTS[3]], Sampled(2.0, seed=5))[0]


@pytest.mark.parametrize("seed", [None, 7])
def test_forks_draw_their_own_numbers(seed: int | None) -> None:
    def forked() -> list[list[int]]:
        engine = new_engine()
        parent = engine.add(PROMPTS[1], max_new_tokens=COUNT, sampling=Sampled(2.0, seed=seed))
        engine.step()
        children = [engine.fork(parent) for _ in range(3)]
        children.append(engine.fork(parent, sampling=Sampled(2.0, seed=9)))
        events = list(run(engine))
        return [tokens(events, i) for i in (parent, *children)]

    found = forked()
    assert len({tuple(text[-8:]) for text in found}) == 5 and forked() == found


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seed": -1}, "seed = -1: give an integer"), ({"model": object()}, "model: object has no num_layers")],
)
def test_what_no_engine_can_be_made_of(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        new_engine(**options)


def test_a_loaded_session_is_no_model() -> None:
    class Loaded:
        model = TinyModel()

    with pytest.raises(ArgumentError, match=r"model: Loaded has no num_layers .*give its \.model"):
        new_engine(model=Loaded())  # type: ignore[arg-type]


def test_the_most_new_tokens_are_told() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"max_new_tokens = <an integer of 100 bits>: give 1 to 59 .the prompt has 5 tokens",
    ):
        new_engine().add(PROMPTS[1], max_new_tokens=10**30)
