"""append by requests: what is refused, and in which words. What it writes is test_open_blocks' to say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.builder import assemble
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.runtime.raw import RawRows
from tests.runtime.test_cache_formats import ROW, spec_of

SPEC = spec_of({"format": "int8", "group": {"head": 1, "tok": 4}}, keep_first=5, keep_last=3, page_size=8)
PLAIN = spec_of({"format": "int8", "group": ROW})


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(spec: Any = SPEC, rows: int | None = None, reserve: Any = (), **changes: Any) -> None:
    """An append of 3 and 2 rows to requests that have 10 and 4 tokens then, with some arguments changed."""
    lib = assemble(spec)
    cache = lib.new_cache(6, **({} if rows is None else {"raw_rows": rows}))
    if rows is not None:
        RawRows([cache]).reserve(reserve)
    tokens = torch.zeros(5, 2, 64)
    given: dict[str, Any] = {"k": tokens, "v": tokens}
    if spec is SPEC:
        given |= {"page_table": ints([2, 3], [4, 99]), "kv_lens": ints(10, 4), "q_starts": ints(0, 3, 5)}
    lib.append(cache, **{name: value for name, value in (given | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.arange(5)}, "slots = .*become codes together, request by request; give page"),
        ({"positions": ints(*range(5))}, "positions = .*follow from kv_lens and q_starts; leave pos"),
        ({"kv_lens": None}, r"kv_lens: missing; give page_table, kv_lens \(new tokens counted\) and"),
        ({"page_table": ints([2, 3], [4, 99]).long()}, r"page_table: dtype int64, not int32; use \.int\(\)"),
        ({"kv_lens": ints(10)}, r"kv_lens: shape \(1,\), not \(2\)"),
        ({"q_starts": ints(0, 5)}, r"q_starts: shape \(2,\), not \(3\)"),
        ({"q_starts": ints(0, 3, 6)}, "q_starts = .*end at the 5 rows of k"),
        ({"kv_lens": ints(17, 4)}, r"kv_lens\[0\] = 17: a row of 2 pages of 8 tokens holds 0 to 16"),
        ({"kv_lens": ints(10, 1)}, r"kv_lens\[1\] = 1: request 1 has 2 new rows, and kv_lens counts them"),
        ({"page_table": ints([2, 6], [4, 99])}, r"page_table\[0, 1\] = 6: the pool has pages 0 to 5"),
        ({"page_table": ints([2, 3], [4, 3]), "kv_lens": ints(10, 9)},
         "requests 0 and 1 both write to the same tokens of page 3, or turn them into codes; copy"),
        ({"params": {"rope_table": torch.zeros(9, 8)}}, r"params\['rope_table'\]: this op reads no such"),
        ({"v": torch.zeros(5, 2, 64).half()}, "v: dtype float16, not float32"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("reserve", "page", "request_"),
    # Tokens 7 to 9 of request 0 are new and open, the older ones 5 and 6 in page 2 too; all of request 1 are
    # protected.
    [
        ((3, 4), r"page_table\[0, 0\] = 2", 0),
        ((2, 4), r"page_table\[0, 1\] = 3", 0),
        ((2, 3), r"\[1, 0\] = 4", 1),
    ],
)
def test_pages_without_the_raw_row_they_need(reserve: tuple[int, ...], page: str, request_: int) -> None:
    words = rf"{page}: request {request_} has unquantised tokens in this page.*RawRows\(\[cache\]\)\.reserve"
    with pytest.raises(ArgumentError, match=words):
        call(rows=3, reserve=reserve)


def test_two_pages_with_one_raw_row() -> None:
    lib = assemble(SPEC)
    cache, rows = lib.new_cache(6), torch.zeros(3, 2, 64)
    cache.raw_rows[3] = cache.raw_rows[2]
    table = ints([2, 3, 4])
    with pytest.raises(ArgumentError, match="raw_rows: pages 2 and 3 both have raw row 2, and one's tokens"):
        lib.append(cache, rows, rows, page_table=table, kv_lens=ints(10), q_starts=ints(0, 3))


def test_tables_are_not_for_specs_that_take_slots() -> None:
    with pytest.raises(ArgumentError, match=r"page_table = .*becomes codes at once, in its slot; give slots"):
        call(PLAIN, page_table=ints([0, 1]))
    with pytest.raises(ArgumentError, match=r"kv_lens = .*leave kv_lens out"):
        call(PLAIN, slots=torch.arange(5), kv_lens=ints(5))
    with pytest.raises(ArgumentError, match="slots = None: give a torch tensor"):
        call(PLAIN)


def test_readers_and_copies_look_for_raw_rows_too() -> None:
    lib = assemble(SPEC)
    cache = lib.new_cache(6, raw_rows=4)
    rows = RawRows([cache])
    rows.reserve([0, 2])
    q, lens = torch.zeros(1, 4, 64).bfloat16(), ints(20)
    table = ints([0, 1, 2])
    with pytest.raises(
        ArgumentError, match=r"page_table\[0, 1\] = 1: request 0 has unquantised tokens in this page"
    ):
        lib.gather(cache, table, ints(10))
    for page, at in ((2, 2), (0, 0)):
        rows.release([page])
        with pytest.raises(ArgumentError, match=rf"page_table\[0, {at}\] = {page}: request 0 has"):
            lib.decode(q, cache, table, lens)
        rows.reserve([page])
    cache.raw_rows[2] = 4
    with pytest.raises(ArgumentError, match="its raw row is 4, but there are rows 0 to 3"):
        lib.decode(q, cache, table, lens)
    with pytest.raises(ArgumentError, match=r"dst_pages\[1\] = 1: page 0 has a raw row, and page 1 has none"):
        lib.copy(cache, ints(3, 0), ints(4, 1))
    with pytest.raises(ArgumentError, match=r"src_pages\[0\] = 2: its raw row is 4"):
        lib.copy(cache, ints(2), ints(1))


def test_a_cascade_says_why_not() -> None:
    lib = assemble(SPEC)
    cache, q = lib.new_cache(4), torch.zeros(1, 4, 64).bfloat16()
    with pytest.raises(UnsupportedError, match="which tokens of a prefix are codes follows from the length"):
        lib.cascade(q, cache, ints(0), 8, ints([1]), ints(3))
