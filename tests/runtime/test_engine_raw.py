"""Engine over caches that leave tokens unquantised: exact tokens however batched, every raw row counted."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.errors import ArgumentError
from kvgen.passes.validate import load_spec
from kvgen.runtime.engine import Engine
from tests.support.engines import library
from tests.support.tiny_engine import COUNT, PROMPTS, check_pages, exact, new_engine, run, tokens
from tests.support.tiny_model import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")


def spec_of(k: dict[str, Any], **cache: Any) -> Any:
    att = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "q_dtype": "f32"}
    return load_spec({"name": "raw", "attention": att, "cache": {"page_size": 4, "k": k, "v": k, **cache}})


ALL_RAW = spec_of({"format": "int4"}, keep_last=64)
"""Nothing of the tiny model's 64 positions ever becomes a code, so that its tokens are the exact ones."""
BOTH_ENDS = spec_of({"format": "int8"}, keep_first=3, keep_last=6)
BLOCKS = spec_of({"format": "int8", "group": {"head": 1, "tok": 4}})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 3, "chunk": 7},
        {"num_pages": 10, "max_batch": 4, "chunk": 5},
        {"max_batch": 4, "chunk": 16, "raw_rows": 17},
    ],
    ids=str,
)
def test_raw_tokens_are_exact_and_make_requests_wait_for_raw_rows(options: dict[str, Any]) -> None:
    engine = new_engine(spec=ALL_RAW, **options)
    ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    events = engine.step() + engine.step()
    child, said = engine.fork(ids[3]), len(tokens(events, ids[3]))
    check_pages(engine)
    events += run(engine)
    assert [tokens(events, i) for i in ids] == exact()
    assert tokens(events, child) == exact()[3][said:]
    assert engine.store.rows.free == engine.store.rows.total


@pytest.mark.parametrize("spec", [BOTH_ENDS, BLOCKS], ids=["both-ends", "blocks"])
def test_codes_give_nearly_the_exact_tokens(spec: Any) -> None:
    for options in ({"max_batch": 1}, {"max_batch": 4, "chunk": 6}, {"num_pages": 8}):
        engine = new_engine(spec=spec, **options)
        ids = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
        events = list(run(engine))
        same = sum(tokens(events, i) == want for i, want in zip(ids, exact(), strict=True))
        assert same >= len(ids) - 1
        assert any(event.kind == "preempted" for event in events) == ("num_pages" in options)


def test_prompts_are_cut_by_a_grid_of_their_own() -> None:
    model = TinyModel(BLOCKS)
    engine = new_engine(spec=BLOCKS, model=model, max_batch=2, chunk=11)
    engine.add(PROMPTS[3], max_new_tokens=2)
    engine.add(PROMPTS[2], max_new_tokens=2)
    list(run(engine))
    # 11 tokens hold two blocks of 4: prompts of 17 and 9 are cut at 8 and 16, whatever the other leaves of
    # the budget.
    assert [step.kv_lens_B.tolist() for step in model.steps] == [[8, 8], [16, 9], [10, 17], [18]]


def test_too_few_raw_rows_are_refused_at_once() -> None:
    engine = Engine(TinyModel(ALL_RAW), library("portable", ALL_RAW), num_pages=32, max_batch=2, raw_rows=4)
    with pytest.raises(
        ArgumentError, match="raw_rows = 4: a request of 22 tokens may hold 6 at a time; give"
    ):
        engine.add(PROMPTS[0] * 20, max_new_tokens=2)
    with pytest.raises(ArgumentError, match="raw_rows = 40: give 1 to 32"):
        Engine(TinyModel(ALL_RAW), library("portable", ALL_RAW), num_pages=32, raw_rows=40)
