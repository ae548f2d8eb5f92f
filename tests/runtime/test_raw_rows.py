"""RawRows: which pages have raw rows, handed out and taken back; copies of rows; what reopening rounds to."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from kvgen.builder import assemble
from kvgen.errors import ArgumentError
from kvgen.ir import RawSpec
from kvgen.runtime.raw import OutOfRawRows, RawRows, copy_rows, most_rows, reopened
from kvgen.runtime.reopen import hadamard
from tests.runtime.test_cache_formats import KIVI, spec_of

RULES = [
    RawSpec(first, last, block, 8)
    for first, last, block in [(0, 0, 4), (3, 5, 4), (9, 0, 8), (5, 12, 1), (0, 7, 2), (17, 1, 1)]
]


def raw_tokens(rule: RawSpec, length: int) -> set[int]:
    return {t for t in range(length) if rule.is_raw(t, length)}


@pytest.mark.parametrize("rule", RULES)
def test_a_cut_makes_raw_again_what_has_become_codes_and_no_more(rule: RawSpec) -> None:
    for length in range(45):
        for settled in range(length + 1):
            kept = raw_tokens(rule, length) | raw_tokens(rule, settled)
            for new in range(length + 1):
                found = [t for run in reopened(rule, settled, length, new) for t in range(*run)]
                assert len(found) == len(set(found))
                assert set(found) == raw_tokens(rule, new) - kept


@pytest.mark.parametrize("rule", RULES)
def test_the_most_rows_that_a_request_holds(rule: RawSpec) -> None:
    lengths = [set(rule.pages(length)) for length in range(80)]
    at_rest = max(map(len, lengths))
    during = max(len(old | new) for at, old in enumerate(lengths) for new in lengths[at:])
    assert most_rows([rule]) == (at_rest, during)
    assert all(len(old | new) <= at_rest + 1 for old, new in pairwise(lengths))


def test_rows_are_handed_out_and_taken_back() -> None:
    lib = assemble(KIVI)
    caches = [*lib.new_cache(6, layers=2, raw_rows=3).layers, lib.new_cache(6, raw_rows=4)]
    rows = RawRows(caches)
    assert rows.total == 3 and rows.block == 8 and len(rows.tensors) == 2
    assert rows.reserve([4, 1, 4]) == [4, 1] and rows.reserve([1]) == []
    for cache in caches:
        assert cache.raw_rows.tolist() == [-1, 1, -1, -1, 0, -1]
    with pytest.raises(OutOfRawRows, match="2 raw rows asked for, but 1 of 3 are free"):
        rows.reserve([0, 2])
    rows.release([4, 5])
    assert rows.row(4) == rows.row(5) == -1 and rows.free == 2
    assert rows.reserve([0, 2]) == [0, 2] and rows.free == 0
    assert caches[2].raw_rows.tolist() == [2, 1, 0, -1, -1, -1]
    with pytest.raises(ArgumentError, match=r"pages\[0\] = 1.5: the cache has pages 0 to 5"):
        rows.reserve([1.5])  # type: ignore[list-item]
    for move in (rows.reserve, rows.release):
        for page in (6, -1):
            with pytest.raises(
                ArgumentError, match=f"pages: {page} among them, but the cache has pages 0 to 5"
            ):
                move([3, page])
    assert rows.row(3) == -1 and rows.free == 0


def test_caches_of_one_model_share_their_pages() -> None:
    lib = assemble(KIVI)
    with pytest.raises(ArgumentError, match=r"caches: they have \[4, 6\] pages"):
        RawRows([lib.new_cache(6), lib.new_cache(4)])
    for wrong in ([], lib.new_cache(4), [3]):
        with pytest.raises(ArgumentError, match="give a list of caches"):
            RawRows(wrong)  # type: ignore[arg-type]


def test_a_model_without_raw_tokens_has_no_rows() -> None:
    rows = RawRows([assemble(spec_of({"format": "int8"})).new_cache(4)])
    assert rows.total == rows.free == 0 and rows.block == 1 and not rows.specs
    assert rows.pages(9) == rows.needed(9) == rows.written(3, 9) == set()


@pytest.mark.parametrize("pairs", [[(0, 1)], [(2, 3), (0, 1), (3, 4)], [(2, 3)], []])
def test_rows_are_copied_where_both_pages_have_one(pairs: list[tuple[int, int]]) -> None:
    cache = assemble(KIVI).new_cache(5, raw_rows=4)
    RawRows([cache]).reserve([4, 0, 1])
    for side in (cache.k_raw, cache.v_raw):
        side.copy_(torch.arange(4)[:, None, None, None].expand_as(side))
    src, dst = (torch.tensor([pair[at] for pair in pairs], dtype=torch.int32) for at in (0, 1))
    copy_rows(cache, src, dst)
    want = [0, 1, 1 if (0, 1) in pairs else 2, 3]
    for side in (cache.k_raw, cache.v_raw):
        assert side[:, 0, 0, 0].tolist() == want and side.amin() >= 0


def test_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    eye = hadamard(torch.eye(16))
    signs = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    assert torch.equal(eye, torch.tensor(signs) / 4.0)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 2, 64)).astype(np.float32))
    torch.testing.assert_close(hadamard(hadamard(x)), x)
