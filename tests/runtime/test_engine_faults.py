"""Engine: aborts, models and copies that fail, refused requests; no page is lost, and none is freed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.runtime.request import Event
from tests.support.specs import make_spec
from tests.support.tiny_engine import COUNT, PROMPTS, check_pages, exact, new_engine, run, tokens
from tests.support.tiny_model import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_missing_scale_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"scales\['k'\]: missing"):
        new_engine(spec=make_spec("int8-head", "int8-head", page_size=4, head_dim=16))


@pytest.mark.parametrize("steps", range(12))
def test_line_34_abort_at_every_point(steps: int) -> None:
    engine = new_engine(num_pages=9, chunk=4, max_batch=4)
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events = [event for _ in range(steps) for event in engine.step()]
    assert engine.abort(ids[1]) and engine.abort(ids[3])
    assert not engine.abort(ids[1]), "aborted twice"
    check_pages(engine)
    events += run(engine)
    for at in (0, 2, 4, 5):
        assert tokens(events, ids[at]) == exact()[at]
    assert all(tokens(events, ids[at]) == exact()[at][: len(tokens(events, ids[at]))] for at in (1, 3))
    with pytest.raises(ArgumentError, match="request 99: not waiting or running"):
        engine.abort(99)


@pytest.mark.parametrize("fault", ["raise", "shape"])
def test_a_step_whose_model_fails_can_be_tried_again(fault: str) -> None:
    class Failing(TinyModel):
        fails = False

        def forward(self, *args: Any) -> torch.Tensor:
            logits = super().forward(*args)
            self.fails = not self.fails
            if self.fails and fault == "raise":
                raise RuntimeError("out of memory")
            if self.fails and len(logits):
                return logits[:, :-1]
            return logits

    engine = new_engine(num_pages=9, max_batch=4, chunk=8, model=Failing())
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events: list[Event] = []
    faults = 0
    for _ in range(300):
        try:
            events += engine.step()
        except (RuntimeError, ArgumentError):
            faults += 1
        check_pages(engine)
    assert engine.idle and faults > 10
    assert [tokens(events, i) for i in ids] == exact()


def test_a_copy_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    other = engine.add(PROMPTS[1], max_new_tokens=COUNT)
    parent = engine.add(PROMPTS[3], max_new_tokens=COUNT)
    events = engine.step() + engine.step()
    child = engine.fork(parent)

    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(engine.store, "copy_pages", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        engine.step()
    monkeypatch.undo()
    check_pages(engine)
    events += run(engine)
    assert [tokens(events, i) for i in (other, parent, child)] == [exact()[1], exact()[3], exact()[3][2:]]


def test_generate_leaves_nothing_behind() -> None:
    engine = new_engine(num_pages=8)
    with pytest.raises(ArgumentError, match="shorten the prompt"):
        engine.generate([PROMPTS[0], [1] * 40], max_new_tokens=COUNT)
    assert engine.idle and engine.generate([], max_new_tokens=1) == []
    engine.add(PROMPTS[0], max_new_tokens=1)
    with pytest.raises(ArgumentError, match="1 requests are under way"):
        engine.generate(PROMPTS, max_new_tokens=1)
    engine.step()
    assert engine.generate(PROMPTS, max_new_tokens=COUNT) == exact()


@pytest.mark.parametrize(
    "prompt, options, reason",
    [
        ([], {}, r"prompt = \[\]"),
        ([1, 61], {}, r"prompt\[1\] = 61: token ids are 0 to 60"),
        ([-1], {}, r"prompt\[0\] = -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([1] * 60, {"max_new_tokens": 5}, r"the pool \(8 pages of 4 tokens\) holds 32; shorten the prompt"),
        ([1] * 20, {"max_new_tokens": 13}, r"the pool \(8 pages of 4 tokens\) holds 32; give at most 12"),
        ([1], {"sampling": 0.7}, r"sampling = 0.7: give Greedy\(\) or Sampled"),
    ],
)
def test_line_32_what_is_refused_at_the_door(prompt: list[int], options: dict[str, Any], reason: str) -> None:
    engine = new_engine(num_pages=8)
    with pytest.raises(ArgumentError, match=reason):
        engine.add(prompt, **{"max_new_tokens": 1, **options})
    parent = engine.add(PROMPTS[0], max_new_tokens=9)
    events = engine.step()
    with pytest.raises(ArgumentError, match="holds 32; give at most 30"):
        engine.fork(parent, max_new_tokens=31)
    with pytest.raises(ArgumentError, match="stop = 7: give the token ids"):
        engine.fork(parent, stop=7)
    check_pages(engine)
    assert tokens(events + list(run(engine)), parent) == exact()[0][:9]


def test_an_attention_that_sees_the_future_is_refused() -> None:
    spec = make_spec("f32", "f32", page_size=4, head_dim=16, mask=(False, None))
    with pytest.raises(ArgumentError, match="causal = False"):
        new_engine(spec=spec)
