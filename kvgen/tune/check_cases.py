"""The cases of decode and prefill: lengths that are hard for a schedule, and what the interpreter bears."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvgen.ir.plan import KernelPlan
from kvgen.library import Library

PROGRAMS = 32
"""Most program instances of one interpreted launch (20 to 35 ms each)."""

DECODE_QUERIES = (1, 3, 8, 2, 5, 4, 7, 6)
"""Queries of each request of a multi-query decode, in turn."""


@dataclass(frozen=True)
class Case:
    """One launch."""

    name: str
    q_lens: tuple[int, ...]
    """Queries of each request."""
    kv_lens: tuple[int, ...]
    """Keys of each request."""
    edges: tuple[int, ...] = ()
    """Positions where tiles and splits end."""
    negative: int | None = None
    """The request with very negative logits."""


def attention_cases(library: Library, op: str, variant: str) -> Iterator[Case]:
    """Cases for the compiled kernel of decode or prefill, from its own tile and split."""
    plan = library.kernel(op, variant).plan
    page = library.spec.cache.page_size
    tile = _constant(plan, "TILE")
    split = _constant(plan, "SPLIT", "SPLIT_TOKENS")
    pairs = _decode(page, tile, split, plan, variant) if op == "decode" else _prefill(page, tile, plan)
    edges = tuple(sorted({tile, 2 * tile, split, 2 * split} - {0}))
    # Requests of the list come in this order; the last one has very negative logits.
    pairs = [*pairs, (pairs[1][0], page + 2)]
    batches = _launches(library, op, plan, pairs) if plan.target.interpreted else [tuple(range(len(pairs)))]
    for batch in batches:
        last = len(batch) - 1 if batch[-1] == len(pairs) - 1 else None
        yield _case(op, [pairs[i] for i in batch], edges, last)
    if not plan.target.interpreted:
        yield _case(op, [pairs[5]], edges, None)  # alone: no other request to share pages or threads with
        yield _case(op, [pairs[0]], edges, None)  # nothing but empty requests


def _case(op: str, pairs: Sequence[tuple[int, int]], edges: tuple[int, ...], negative: int | None) -> Case:
    q_lens, kv_lens = tuple(q for q, _ in pairs), tuple(n for _, n in pairs)
    return Case(f"{op} q {list(q_lens)} kv {list(kv_lens)}", q_lens, kv_lens, edges, negative)


def _decode(page: int, tile: int, split: int, plan: KernelPlan, variant: str) -> list[tuple[int, int]]:
    if plan.target.interpreted:
        lens = [0, 1, page - 1, page, page + 1, tile + 1, split + tile // 2 + 1]
    else:
        few = 2 * split if split <= 1024 else split
        lens = [0, 1, page - 1, page, page + 1, tile - 1, tile, tile + 1, 3 * tile + page // 2 + 1]
        lens += [split, split + 1, few + tile + 3]
    lens = list(dict.fromkeys(lens))
    if variant == "single":
        return [(1, n) for n in lens]
    return [(DECODE_QUERIES[b % len(DECODE_QUERIES)], n) for b, n in enumerate(lens)]


def _prefill(page: int, tile: int, plan: KernelPlan) -> list[tuple[int, int]]:
    if plan.target.interpreted:
        return [(2, 0), (5, 1), (3, page + 1), (0, page), (9, tile + 10)]
    q_tile = _constant(plan, "Q_TILE") or 32
    pairs = [(2, 0), (34, 1), (1, 1), (17, page - 1), (3, page), (3, page + 1), (0, page + 3)]
    # Whole prompts, and chunks of prompts whose earlier part is cached already.
    pairs += [(37, 37), (q_tile + 1, 2 * tile + page + 3), (127, tile + 132)]
    return pairs


def _launches(
    library: Library, op: str, plan: KernelPlan, pairs: Sequence[tuple[int, int]]
) -> list[tuple[int, ...]]:
    """Cut the requests into launches of at most ``PROGRAMS`` program instances where one request allows."""
    att, page = library.spec.attention, library.spec.cache.page_size
    rows, split = int(plan.answers["rows"]), _constant(plan, "SPLIT", "SPLIT_TOKENS")
    found: list[tuple[int, ...]] = []
    held: list[int] = []
    for i in range(len(pairs)):
        trial = [*held, i]
        tiles = -(-max(pairs[j][0] for j in trial) * att.group // rows)
        width = max(-(-pairs[j][1] // page) for j in trial) + 2
        splits = -(-width * page // split) if op == "decode" and split else 1
        if held and len(trial) * att.kv_heads * max(1, tiles) * splits > PROGRAMS:
            found.append(tuple(held))
            trial = [i]
        held = trial
    return [*found, tuple(held)]


def _constant(plan: KernelPlan, *names: str) -> int:
    """The first of these constants that the kernel has; 0 where it has none."""
    return next((int(c.value) for name in names for c in plan.constants if c.name == name), 0)
