"""Cases: the default set, names, and shapes of one's own."""

from __future__ import annotations

import pytest

from kvgen.bench.cases import CASES, RIVALS, choose, free
from kvgen.errors import ArgumentError


def test_the_default_set() -> None:
    shapes = [
        (case.op, len(case.kv_lens), max(case.kv_lens, default=0), max(case.q_lens, default=0))
        for case in choose([])
    ]
    for shape in [
        ("decode", 1, 512, 1),
        ("decode", 1, 8192, 1),
        ("decode", 8, 4096, 1),
        ("decode", 32, 512, 1),
        ("decode", 32, 2048, 1),
        ("decode", 8, 4096, 4),
        ("decode", 32, 8192, 1),
        ("prefill", 1, 2048, 2048),
        ("prefill", 4, 512, 512),
        ("prefill", 1, 8704, 512),
    ]:
        assert shape in shapes
    assert {case.op for case in choose([])} == {"decode", "prefill", "append", "copy", "gather"}


def test_one_long_request_is_held_against_as_many_keys_in_equal_ones() -> None:
    mixed = CASES["decode-mixed"]
    even = RIVALS[mixed.even]
    assert mixed.kv_lens == (8192, *(128,) * 31)
    assert (even.keys, len(set(even.kv_lens)), len(even.kv_lens)) == (mixed.keys, 1, 32)
    assert mixed.groups == ((1, 1, 8192), (31, 1, 128))


def test_an_op_stands_for_all_of_its_cases() -> None:
    assert [case.name for case in choose(["append", "decode-1x512", "append-8"])] == [
        "append-8", "append-32", "decode-1x512"
    ]  # fmt: skip


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"--case decode-8x4090.*decode-8x4096"):
        choose(["decode-8x4090"])


def test_shapes_of_ones_own() -> None:
    one, two = free([3, 4], 100, None)
    assert (one.op, one.kv_lens, one.q_lens) == ("decode", (100,) * 3, (1,) * 3)
    assert len(two.kv_lens) == 4
    assert free([], None, 4)[0].name == "decode-8x4096-q4"
    assert free([1], 64, 64)[0].op == "prefill"
    assert free([1], 640, 64)[0].name == "prefill-1x64-on-576"
    with pytest.raises(ArgumentError, match="--queries 65"):
        free([1], 64, 65)


def test_titles() -> None:
    titles = {str(case) for case in CASES.values()}
    assert {"decode 8 x 4096", "decode 8 x 4096 with 4 queries each", "prefill 1 x 512 on 8192"} <= titles
    assert {"decode 1 x 8192 and 31 x 128", "prefill 4 x 512", "append of 32 tokens"} <= titles
    assert {"gather 8 x 1024", "copy of 1024 tokens in whole pages"} <= titles


def test_pairs_are_those_of_a_causal_mask() -> None:
    case = free([2], 7, 3)[0]
    assert case.pairs == 2 * (5 + 6 + 7)
