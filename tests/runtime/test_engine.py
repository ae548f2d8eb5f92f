"""Engine: greedy tokens equal those of a float64 model without cache, pages or batch, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.runtime.request import Event
from kvgen.runtime.sampling import Greedy, Sampled
from tests.support.specs import make_spec
from tests.support.tiny_engine import COUNT, PROMPTS, check_pages, exact, new_engine, run, tokens
from tests.support.tiny_model import SPEC, TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWED = make_spec("f32", "f32", "nhd", page_size=4, kv_heads=2, group=2, head_dim=16, mask=(True, 5))


@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 1},  # alone
        {},
        {"max_batch": 6, "chunk": 6},
        {"max_batch": 3, "chunk": 7},
        {"max_batch": 4, "chunk": 16},
        {"num_pages": 8},
        {"num_pages": 10, "max_batch": 4, "chunk": 5},
    ],
    ids=str,
)
def test_line_35_greedy_tokens_are_the_same_however_batched(options: dict[str, Any], spec: Any) -> None:
    engine = new_engine(spec=spec, **options)
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events = list(run(engine))
    assert [tokens(events, i) for i in ids] == exact(spec)
    assert any(event.kind == "preempted" for event in events) == ("num_pages" in options)


@pytest.mark.parametrize("format", ["bf16", "int8-token", "int8-head"])
def test_stored_formats_give_the_same_tokens_however_batched(format: str) -> None:
    spec = make_spec(format, format, page_size=4, kv_heads=2, group=2, head_dim=16)
    scales = {"k": [0.05, 0.04], "v": [0.03, 0.05]} if format == "int8-head" else None
    found = [
        new_engine(spec=spec, scales=scales, **options).generate(PROMPTS, max_new_tokens=COUNT)
        for options in ({"max_batch": 1}, {"max_batch": 4, "chunk": 6}, {"num_pages": 8})
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("page_size, num_pages", [(1, 33), (5, 8), (32, 2)])
def test_pages_of_any_size(page_size: int, num_pages: int) -> None:
    spec = make_spec("f32", "f32", page_size=page_size, kv_heads=2, group=2, head_dim=16)
    engine = new_engine(num_pages, spec, max_batch=3, chunk=11)
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events = engine.step() + engine.step()
    child, said = engine.fork(ids[1]), len(tokens(events, ids[1]))
    events += run(engine)
    assert [tokens(events, i) for i in ids] == exact()
    assert said and tokens(events, child) == exact()[1][said:]


def test_events_tell_the_whole_story() -> None:
    engine = new_engine(chunk=10, max_batch=2)
    one, two = (engine.add(prompt, max_new_tokens=3) for prompt in PROMPTS[2:4])
    first, second = exact()[2][:3], exact()[3][:3]
    assert engine.step() == [
        Event(two, "prefill", done=1, total=17),
        Event(one, "prefill", done=9, total=9),
        Event(one, "token", token=first[0]),
    ]
    assert engine.step() == [Event(one, "token", token=first[1]), Event(two, "prefill", done=10, total=17)]
    assert engine.step() == [
        Event(one, "token", token=first[2]),
        Event(one, "finished", reason="length"),
        Event(two, "prefill", done=17, total=17),
        Event(two, "token", token=second[0]),
    ]
    assert not engine.idle
    assert [event.kind for event in run(engine)] == ["token", "token", "finished"]
    assert engine.idle and engine.step() == []


def test_a_preempted_request_computes_its_tokens_anew() -> None:
    engine = new_engine(num_pages=8)
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events = list(run(engine))
    gone = next(event.request for event in events if event.kind == "preempted")
    mine = [event for event in events if event.request == gone]
    at = next(i for i, event in enumerate(mine) if event.kind == "preempted")
    said = sum(event.kind == "token" for event in mine[:at])
    total = len(PROMPTS[ids.index(gone)]) + said
    assert said and mine[at + 1] == Event(gone, "prefill", done=total, total=total)


def test_a_stop_token_ends_a_request_and_is_reported() -> None:
    want = exact()[3]
    at = next(i for i in range(1, COUNT) if want[i] not in want[:i])
    assert new_engine().generate([PROMPTS[3]], max_new_tokens=COUNT, stop=[want[at]]) == [want[: at + 1]]
    engine = new_engine()
    engine.add(PROMPTS[3], max_new_tokens=1, stop=[want[0]])
    assert list(run(engine))[-1].reason == "stop"


@pytest.mark.parametrize("options", [{}, {"max_batch": 3, "chunk": 4}, {"num_pages": 9}], ids=str)
@pytest.mark.parametrize("steps", range(0, 14, 2))
def test_forks_go_on_as_their_parents_would(steps: int, options: dict[str, Any]) -> None:
    engine = new_engine(**options)
    parent = engine.add(PROMPTS[3], max_new_tokens=COUNT)
    other = engine.add(PROMPTS[2], max_new_tokens=COUNT)
    events = [event for _ in range(steps) for event in engine.step()]
    known = len(tokens(events, parent))
    children = [engine.fork(parent), engine.fork(parent, sampling=Sampled(5.0, seed=1)), engine.fork(parent)]
    check_pages(engine)
    events += run(engine)
    assert tokens(events, parent) == exact()[3] and tokens(events, other) == exact()[2]
    assert tokens(events, children[0]) == tokens(events, children[2]) == exact()[3][known:]
    strange = tokens(events, children[1])
    assert len(strange) == COUNT - known and (strange != exact()[3][known:] or COUNT - known < 3)


def test_a_fork_shares_pages_until_it_writes() -> None:
    engine = new_engine()
    parent = engine.add(PROMPTS[3], max_new_tokens=COUNT)  # 17 tokens: four full pages and one of one token
    engine.step()
    assert engine.store.pool.used == 5
    child = engine.fork(parent, max_new_tokens=2)
    assert engine.store.pool.used == 5
    want = exact()[3]
    assert engine.step() == [Event(parent, "token", token=want[1]), Event(child, "token", token=want[1])]
    assert engine.store.pool.used == 6
    assert engine.abort(parent)
    assert engine.store.pool.used == 5
    assert tokens(list(run(engine)), child) == want[2:3]


def test_draws_depend_on_seed_and_position_alone() -> None:
    hows = [Sampled(2.0, seed=at) for at in range(6)]
    want = []
    for prompt, how in zip(PROMPTS, hows, strict=True):
        said = list(prompt)
        while len(said) < len(prompt) + COUNT:
            said.append(how.draw(TinyModel().exact_logits(said).numpy(), len(said)))
        want.append(said[len(prompt) :])
    assert want != exact()
    for options in ({}, {"max_batch": 1}, {"num_pages": 8}, {"max_batch": 3, "chunk": 4}):
        engine = new_engine(**options)
        ids = [
            engine.add(prompt, max_new_tokens=COUNT, sampling=how)
            for prompt, how in zip(PROMPTS, hows, strict=True)
        ]
        events = list(run(engine))
        assert [tokens(events, i) for i in ids] == want


def test_prompts_may_be_tensors() -> None:
    prompt = torch.tensor(PROMPTS[2])
    assert new_engine().generate([prompt], max_new_tokens=3, sampling=Greedy()) == [exact()[2][:3]]
    assert new_engine().generate([list(prompt)], max_new_tokens=3) == [exact()[2][:3]]
    with pytest.raises(ArgumentError, match=r"prompt\[0\] = 1\.5: give token ids"):
        new_engine().add([1.5], max_new_tokens=1)
