"""Engine: what one request, or one call, must not do to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.passes.validate import load_spec
from kvgen.runtime.sampling import Sampled
from tests.support.tiny_engine import COUNT, PROMPTS, check_pages, exact, new_engine, run, tokens
from tests.support.tiny_model import SPEC, TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")

WILD = Sampled(50.0)
"""Nearly every token is as likely as another: the text is the numbers drawn."""


def test_forks_of_greedy_requests_draw_numbers_of_their_own() -> None:
    engine = new_engine()
    first, second = (engine.add(PROMPTS[3], max_new_tokens=COUNT) for _ in range(2))
    engine.step()
    forks = [engine.fork(parent, sampling=WILD) for parent in (first, second, first)]
    events = list(run(engine))
    assert len({str(tokens(events, i)) for i in forks}) == 3


def test_a_fork_draws_other_numbers_than_a_request_whose_id_is_its_number() -> None:
    """A parent with the engine's own seed."""
    for how in (Sampled(50.0, seed=0), None):
        engine = new_engine()
        options = {} if how is None else {"sampling": how}
        parent = engine.add(PROMPTS[3], max_new_tokens=COUNT, **options)
        engine.step()
        said = [engine.fork(parent, sampling=WILD) for _ in range(3)]
        drawn = list(run(engine))
        other = new_engine()
        for _ in range(4):
            other.add(PROMPTS[3], max_new_tokens=COUNT, sampling=WILD)
        requests = list(run(other))
        texts = [tokens(drawn, i) for i in said]
        texts += [tokens(requests, i)[1:] for i in range(4)]
        assert len({str(text) for text in texts}) == 7


def test_a_call_of_the_engine_by_its_model_is_refused_and_both_calls_are_whole() -> None:
    class Calling(TinyModel):
        calls = True

        def forward(self, *args: Any) -> torch.Tensor:
            if self.calls:
                self.calls = False
                ids.append(engine.add(PROMPTS[1], max_new_tokens=COUNT))
            return super().forward(*args)

    engine = new_engine(model=Calling())
    ids = [engine.add(PROMPTS[3], max_new_tokens=COUNT)]
    with pytest.raises(ArgumentError, match=r"model\.forward: it called the engine that runs it"):
        engine.step()
    check_pages(engine)
    events = list(run(engine))
    assert [tokens(events, i) for i in ids] == [exact()[3], exact()[1]]


def test_an_interrupted_fork_of_a_request_that_waits_far_behind_changes_no_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for fails in (0, 1):
        engine = new_engine(max_batch=1)
        ids = [engine.add(PROMPTS[0], max_new_tokens=2, sampling=WILD) for _ in range(4)]
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(engine.scheduler, "add", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    engine.fork(ids[3])
        child = engine.fork(ids[3])
        found.append(tokens(list(run(engine)), child))
    assert found[0] == found[1]


def test_generate_drops_its_requests_even_if_its_end_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", stop)
        patch.setattr(engine.scheduler, "remove", stop)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, max_new_tokens=COUNT)
    assert engine.idle and engine.generate(PROMPTS, max_new_tokens=COUNT) == exact()
    assert engine.store.pool.used == 0


def test_generate_takes_its_stop_tokens_once_for_all_prompts() -> None:
    want = exact()[3]
    at = next(i for i in range(1, COUNT) if want[i] not in want[:i])
    found = new_engine().generate([PROMPTS[3]] * 2, max_new_tokens=COUNT, stop=iter([want[at]]))
    assert found == [want[: at + 1]] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_generate_names_the_prompt_whose_logits_say_nothing(value: float) -> None:
    class Spoiled(TinyModel):
        def forward(self, step: Any, layers: Any) -> torch.Tensor:
            logits = super().forward(step, layers)
            logits[step.positions_T[step.last_rows_S] == 7] = value
            return logits

    engine = new_engine(model=Spoiled())
    with pytest.raises(ArgumentError, match=rf"prompts\[1\]: .* is {value}"):
        engine.generate([[1] * 9, [1] * 4], max_new_tokens=6)
    assert engine.idle and engine.store.pool.used == 0


def test_tokens_that_are_codes_at_once_are_computed_anew_together() -> None:
    """Protected first tokens are raw whatever a piece is: no grid is needed."""
    att = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "q_dtype": "f32"}
    cache = {"page_size": 4, "keep_first": 3, "k": {"format": "int8"}, "v": {"format": "int8"}}
    spec = load_spec({"name": "first", "attention": att, "cache": cache})
    found = []
    for pages in (64, 8):
        model = TinyModel(spec)
        engine = new_engine(pages, spec, model, max_batch=6, chunk=20)
        ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
        events = list(run(engine))
        found.append([tokens(events, i) for i in ids])
    assert found[0] == found[1]
    again = [event for event in events if event.kind == "prefill" and event.done == event.total]
    assert any(event.total > len(PROMPTS[ids.index(event.request)]) for event in again)
    for event in again:
        steps = [e for e in events if e.kind == "prefill" and e.request == event.request]
        assert len(steps) <= 5, "generated tokens are not computed one by one"


@pytest.mark.parametrize("new", [60, 10**18, 10**30])
def test_the_lower_of_two_limits_is_told_at_once(new: int) -> None:
    with pytest.raises(ArgumentError, match=r"max_new_tokens = .*(to|most) 27"):
        new_engine(8).add(PROMPTS[1], max_new_tokens=new)
    with pytest.raises(ArgumentError, match=r"max_new_tokens = .*(to|most) 59"):
        new_engine(32, SPEC, TinyModel(SPEC)).add(PROMPTS[1], max_new_tokens=new)
