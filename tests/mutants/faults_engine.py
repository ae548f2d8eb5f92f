"""Faults in what serves requests: pages, steps, schedules, draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.mutants.fault import behaviour

Plain = Callable[..., Any]
ENGINE = "tests/runtime/test_engine.py::"
SEQUENCE = "tests/runtime/test_sequence.py::"
GREEDY = ENGINE + "test_line_35_greedy_tokens_are_the_same_however_batched"
HOLDERS = SEQUENCE + "test_each_of_three_holders_writes_into_its_own_copy"


@behaviour(
    "pool-takes-one-page-too-few",
    "The pool hands out one page less than it is asked for, the last one twice.",
    "kvgen.runtime.pool:PagePool.allocate",
    "tests/runtime/test_pool.py::test_pages_come_back_in_the_order_in_which_they_were_freed",
)
def _(plain: Plain, pool: Any, count: int) -> Any:
    return plain(pool, count) if count < 2 else (pages := plain(pool, count - 1)) + pages[-1:]


@behaviour(
    "pool-frees-once-more",
    "A page that is freed twice is taken back without a word.",
    "kvgen.runtime.pool:PagePool.release",
    "tests/runtime/test_pool.py::test_line_29_a_page_freed_twice",
)
def _(plain: Plain, pool: Any, pages: Any) -> Any:
    return plain(pool, [page for page in pages if pool.holders(page)])


@behaviour(
    "pool-forgets-a-second-holder",
    "Holding a page once more is not counted.",
    "kvgen.runtime.pool:PagePool.retain",
    HOLDERS,
)
def _(plain: Plain, pool: Any, pages: Any) -> Any:
    return None


@behaviour(
    "pages-are-not-copied-before-a-write",
    "A fork gets a page of its own, without the bytes of the one it shared.",
    "kvgen.runtime.sequence:PageStore.copy_pages",
    HOLDERS,
)
def _(plain: Plain, store: Any, sources: Any, targets: Any) -> Any:
    return None


@behaviour(
    "a-page-too-many-at-a-boundary",
    "Tokens that fill their pages exactly are given one page more.",
    "kvgen.runtime.sequence:PageStore.pages",
    SEQUENCE + "test_a_full_page_stays_shared_until_someone_cuts_into_it",
)
def _(plain: Plain, store: Any, tokens: int) -> Any:
    return tokens // store.page_size + 1


@behaviour(
    "truncate-keeps-a-token",
    "Truncating a sequence leaves one token more than it was told.",
    "kvgen.runtime.sequence:PagedSequence.truncate",
    SEQUENCE + "test_a_full_page_stays_shared_until_someone_cuts_into_it",
)
def _(plain: Plain, sequence: Any, length: int) -> Any:
    return plain(sequence, min(length + 1, sequence.length) if length else 0)


@behaviour(
    "lengths-before-the-append",
    "A step counts the keys before its append instead of after it.",
    "kvgen.runtime.step:build_step",
    GREEDY,
)
def _(plain: Plain, batch: Any, device: Any = "cpu") -> Any:
    step = plain(batch, device)
    return dataclasses.replace(step, kv_lens_B=(step.kv_lens_B - 1).clamp(min=1))


@behaviour(
    "slots-one-too-far",
    "A step stores each token one slot behind its own.",
    "kvgen.runtime.step:build_step",
    GREEDY,
)
def _(plain: Plain, batch: Any, device: Any = "cpu") -> Any:
    step = plain(batch, device)
    return dataclasses.replace(step, slots_T=step.slots_T ^ 1)


@behaviour(
    "positions-from-one",
    "A step numbers the tokens of a request from 1.",
    "kvgen.runtime.step:build_step",
    GREEDY,
)
def _(plain: Plain, batch: Any, device: Any = "cpu") -> Any:
    step = plain(batch, device)
    return dataclasses.replace(step, positions_T=step.positions_T + 1)


@behaviour(
    "logits-of-another-row",
    "A step asks for the logits of the row before the last.",
    "kvgen.runtime.step:build_step",
    GREEDY,
)
def _(plain: Plain, batch: Any, device: Any = "cpu") -> Any:
    step = plain(batch, device)
    return dataclasses.replace(step, last_rows_S=(step.last_rows_S - 1).clamp(min=0))


@behaviour(
    "stop-tokens-ignored",
    "A request goes on behind its stop token.",
    "kvgen.runtime.engine:Engine.add",
    ENGINE + "test_a_stop_token_ends_a_request_and_is_reported",
)
def _(plain: Plain, engine: Any, prompt: Any, *, stop: Any = (), **options: Any) -> Any:
    return plain(engine, prompt, **options)


@behaviour(
    "a-draw-knows-no-position",
    "A request draws the same number for all its tokens.",
    "kvgen.runtime.sampling:Sampled.draw",
    "tests/runtime/test_sampling.py::test_frequencies_are_those_of_the_softmax",
)
def _(plain: Plain, sampled: Any, logits: Any, position: int, *rest: Any, **options: Any) -> Any:
    return plain(sampled, logits, 0, *rest, **options)


@behaviour(
    "top-p-ignored",
    "A draw is made from all tokens whatever top_p says.",
    "kvgen.runtime.sampling:Sampled.draw",
    "tests/runtime/test_sampling.py::test_cuts_keep_the_likeliest",
)
def _(plain: Plain, sampled: Any, *rest: Any, **options: Any) -> Any:
    return plain(dataclasses.replace(sampled, top_p=1.0), *rest, **options)


@behaviour(
    "top-k-ignored",
    "A draw is made from all tokens whatever top_k says.",
    "kvgen.runtime.sampling:Sampled.draw",
    "tests/runtime/test_sampling.py::test_cuts_keep_the_likeliest",
)
def _(plain: Plain, sampled: Any, *rest: Any, **options: Any) -> Any:
    return plain(dataclasses.replace(sampled, top_k=0), *rest, **options)


@behaviour(
    "a-request-let-in-without-a-page-to-spare",
    "What can never fit into the pool is let in.",
    "kvgen.runtime.scheduler:Scheduler.check",
    "tests/runtime/test_scheduler.py::test_line_32_what_can_never_fit",
)
def _(plain: Plain, scheduler: Any, *rest: Any) -> Any:
    return None


@behaviour(
    "raw-rows-of-the-first-tokens-forgotten",
    "Tokens that keep_first protects are not counted among those that need a raw row.",
    "kvgen.runtime.raw:RawRows.needed",
    "tests/runtime/test_engine_raw.py::test_codes_give_nearly_the_exact_tokens",
)
def _(plain: Plain, rows: Any, length: int) -> Any:
    return {index for index in plain(rows, length) if index > 0}


@behaviour(
    "raw-rows-are-not-given-back",
    "Pages that are freed keep their raw rows.",
    "kvgen.runtime.raw:RawRows.release",
    "tests/runtime/test_raw_rows.py::test_rows_are_handed_out_and_taken_back",
)
def _(plain: Plain, rows: Any, pages: Any) -> Any:
    return None


@behaviour(
    "a-preempted-request-comes-last",
    "A request that gave up its pages waits behind those that came later.",
    "kvgen.runtime.scheduler:Scheduler.fill",
    "tests/runtime/test_scheduler.py::test_who_was_preempted_goes_before_later_arrivals",
)
def _(plain: Plain, scheduler: Any, plan: Any) -> Any:
    scheduler.waiting.sort(key=lambda request: -request.id)
    return plain(scheduler, plan)
