"""Bounds never hide a key that is seen, never show one that is not, and are exact where they say so."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.ir.expression import Name, Node, Op, names_of
from kvgen.passes.bounds import UNKNOWN, Bounds, both, derive, either
from kvgen.passes.parse import parse
from kvgen.passes.simplify import simplify, substitute
from tests.support.expressions import NAMES, PARAMS, evaluate, random_predicate, read

KEYS = 18
BLOCKS = st.tuples(st.integers(-6, 15), st.integers(0, 5))
OTHERS = st.fixed_dictionaries(
    {
        "kv_len": st.integers(0, KEYS),
        "WINDOW": st.integers(0, 5),
        "CHUNK": st.integers(1, 6),
        "lead": st.integers(-2, 9),
        "tree": st.integers(0, 15),
        "shown": st.booleans(),
    }
)


def span(bounds: Bounds, values: Mapping[str, int], ends: tuple[str, str]) -> set[int]:
    """The keys of 0 .. kv_len between two of the bounds."""
    low, high = (getattr(bounds, end) for end in ends)
    first = 0 if low is None else evaluate(low, values)
    past = values["kv_len"] if high is None else evaluate(high, values)
    return set(range(max(first, 0), min(past, values["kv_len"])))


def check(node: Node, bounds: Bounds, block: tuple[int, int], others: Mapping[str, int]) -> None:
    first, more = block
    values = dict(others) | {"pos_first": first, "pos_last": first + more, "q_len": 3}
    seen = []
    for q in range(first, first + more + 1):
        at = values | {"q_pos": q, "q_row": q - values["kv_len"] + values["q_len"]}
        seen.append({key for key in range(values["kv_len"]) if evaluate(node, at | {"kv_pos": key})})
    some, every = span(bounds, values, ("lo", "hi")), span(bounds, values, ("full_lo", "full_hi"))
    assert set.union(*seen) <= some
    if not bounds.never_full:
        assert every <= set.intersection(*seen)
    if bounds.exact and not more:
        assert some == seen[0]


@given(st.data(), BLOCKS, OTHERS)
def test_bounds_are_sound(data: st.DataObject, block: tuple[int, int], others: dict[str, int]) -> None:
    node = random_predicate(lambda options: data.draw(st.sampled_from(options)), 2)
    check(node, derive(node), block, others)


INTERVALS = [
    "kv_pos <= q_pos",
    "q_pos >= kv_pos",
    "kv_pos < q_pos + 1",
    "not kv_pos > q_pos",
    "kv_pos - q_pos <= 0",
    "0 <= q_pos - kv_pos",
    "kv_pos <= kv_len - q_len + q_row",
    "kv_pos + WINDOW >= q_pos",
    "q_pos - kv_pos <= WINDOW",
    "q_pos - kv_pos < 3",
    "kv_pos >= q_pos - 2 and kv_pos <= q_pos",
    "0 <= q_pos - kv_pos <= WINDOW",
    "kv_pos <= q_pos + WINDOW",
    "abs(q_pos - kv_pos) <= WINDOW",
    "abs(kv_pos - q_pos) < 4",
    "not abs(kv_pos - q_pos) > 4",
    "max(q_pos - kv_pos, kv_pos - q_pos) <= 2",
    "kv_pos // CHUNK == q_pos // CHUNK",
    "kv_pos // 4 == q_pos // 4",
    "q_pos // CHUNK - kv_pos // CHUNK <= 1",
    "(q_pos - kv_pos) // 3 == 0",
    "kv_pos <= q_pos or kv_pos < lead[batch]",
    "kv_pos < max(q_pos + 1, lead[batch])",
    "kv_pos >= lead[batch]",
    "kv_pos >= 3 and kv_pos < 9",
    "kv_pos == q_pos",
    "kv_pos <= q_pos and kv_len > 4",
    "kv_len - q_len != 3",
    "2 * kv_pos <= q_pos",
    "3 * kv_pos >= 2 * q_pos",
    "where(lead[batch] < 99, kv_pos <= q_pos, kv_pos <= q_pos)",
    "not (kv_pos > q_pos or kv_pos + WINDOW < q_pos)",
]  # fmt: skip


@pytest.mark.parametrize("text", INTERVALS)
@settings(max_examples=20)
@given(BLOCKS, OTHERS)
def test_intervals_are_exact_and_tight(text: str, block: tuple[int, int], others: dict[str, int]) -> None:
    """Not only sound: for each of these, nothing that no query sees is inside ``lo .. hi``."""
    node = read(text)
    bounds = derive(node)
    assert bounds.exact
    assert not bounds.never_full
    check(node, bounds, block, others)
    check(node, bounds, (block[0], 0), others)
    first, more = block
    values = dict(others) | {"pos_first": first, "pos_last": first + more, "q_len": 3}
    ends = []
    for q in range(first, first + more + 1):
        ends.append(span(bounds, values | {"pos_first": q, "pos_last": q}, ("lo", "hi")))
    if all(ends):
        some, every = span(bounds, values, ("lo", "hi")), span(bounds, values, ("full_lo", "full_hi"))
        assert some == set(range(min(map(min, ends)), max(map(max, ends)) + 1))
        assert every == set.intersection(*ends)


@pytest.mark.parametrize(
    ("text", "lo", "hi", "full_lo", "full_hi"),
    [
        ("kv_pos <= q_pos", "", "pos_last + 1", "", "pos_first + 1"),
        ("kv_pos + WINDOW >= q_pos", "pos_first - WINDOW", "", "pos_last - WINDOW", ""),
        (
            "kv_pos // CHUNK == q_pos // CHUNK",
            "CHUNK * (pos_first // CHUNK)",
            "CHUNK * (pos_last // CHUNK) + CHUNK",
            "CHUNK * (pos_last // CHUNK)",
            "CHUNK * (pos_first // CHUNK) + CHUNK",
        ),
        (
            "kv_pos <= q_pos or kv_pos < lead[batch]",
            "",
            "max(pos_last + 1, lead[batch])",
            "",
            "max(pos_first + 1, lead[batch])",
        ),
    ],
)
def test_texts(text: str, lo: str, hi: str, full_lo: str, full_hi: str) -> None:
    found = derive(read(text))
    given_ = (found.lo, found.hi, found.full_lo, found.full_hi)
    assert given_ == tuple(at_block(wanted) for wanted in (lo, hi, full_lo, full_hi))


def at_block(text: str) -> Node | None:
    return parse(text, {**NAMES, "pos_first": "int", "pos_last": "int"}, PARAMS) if text else None


@pytest.mark.parametrize(
    "text",
    [
        "shown[q_row, kv_pos]",
        "doc[batch, kv_pos] == doc[batch, q_pos]",
        "kv_pos % 3 == 0",
        "head * kv_pos < 3",
        "kv_pos < head",
        "kv_pos // lead[batch] < 3",
        "kv_pos * kv_pos < 9",
        "q_pos > 2",
        "score < 3",
        "slope[head] < kv_pos",
        "kv_pos < tree[q_row]",
        "not shown[q_row, kv_pos]",
    ],
)
def test_what_says_nothing_of_ranges(text: str) -> None:
    assert derive(read(text)) == UNKNOWN


def test_a_range_and_what_says_nothing() -> None:
    """The bounds of the range stay; nothing is seen by all for certain, and the predicate is still needed."""
    found = derive(read("kv_pos <= q_pos and shown[q_row, kv_pos]"))
    assert found.hi == at_block("pos_last + 1")
    assert (found.never_full, found.exact) == (True, False)
    tree = derive(read("kv_pos < kv_len - q_len or tree[q_row] >> max(kv_pos - kv_len + q_len, 0) & 1 == 1"))
    assert (tree.lo, tree.hi) == (None, None)
    assert (tree.full_hi, tree.never_full, tree.exact) == (at_block("kv_len - q_len"), False, False)


def test_two_ranges_apart_keep_the_longer_full_one() -> None:
    found = derive(read("kv_pos < 4 or q_pos - kv_pos < 100"))
    assert (found.lo, found.hi, found.exact) == (None, None, False)
    assert (found.full_lo, found.full_hi) == (at_block("pos_last - 99"), None)


def test_truths_and_combinations() -> None:
    everything, nothing = derive(read("True")), derive(read("1 > 2"))
    assert everything == Bounds()
    assert nothing.exact
    assert evaluate(nothing.hi, {}) == 0  # type: ignore[arg-type]
    causal = derive(read("kv_pos <= q_pos"))
    assert both(causal, everything) == causal
    assert either(causal, UNKNOWN) == Bounds(None, None, None, causal.full_hi, False, False)


def test_one_query_at_the_end_sees_all() -> None:
    """Decode: causal bounds nothing beyond the length of the request."""
    last = simplify(read("kv_len - 1"))
    found = derive(read("kv_pos <= q_pos and kv_pos + WINDOW >= q_pos"))
    at = {"pos_first": last, "pos_last": last}
    assert found.hi is not None
    assert found.lo is not None
    assert simplify(substitute(found.hi, at)) == Name("kv_len")
    assert names_of(simplify(substitute(found.lo, at))) == {"kv_len", "WINDOW"}
    assert simplify(substitute(found.lo, at)) == Op(
        "-", (Op("-", (Name("kv_len"), Name("WINDOW"))), read("1"))
    )
