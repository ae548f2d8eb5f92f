"""Tables on narrow terminals: no name and no number is cut, whatever the command."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvgen.commands import bench_report, columns, output
from tests.support.bench_reports import recorded


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes ``output`` write to a terminal of some width; the text so far comes from ``getvalue``."""

    def make(width: int) -> io.StringIO:
        written = io.StringIO()
        made = Console(file=written, width=width, force_terminal=True, color_system=None, highlight=False)
        monkeypatch.setattr(output, "console", lambda: made)
        monkeypatch.setattr(output, "is_terminal", lambda: True)
        return written

    return make


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("specs", [1, 2, 4, 8])
def test_bench_cuts_no_name_and_no_number(terminal: Any, width: int, specs: int) -> None:
    report = recorded(specs)
    case = report.cases[0]
    short = bench_report.short_names(list(report.specs))
    texts = []
    for columns_there in (1000, width):
        written = terminal(columns_there)
        bench_report.print_case(case, short, 2)
        texts.append(written.getvalue().splitlines())
    wide, lines = texts
    table = [line for line in lines if not line.startswith(("Decode", "Read limit"))]
    for row in case.rows:
        mine = [line for line in table if line.startswith(f"{row.contender} ")]
        assert mine, row.contender
        told = " ".join(line.removeprefix(row.contender) for line in mine).split()
        whole = next(line for line in wide if line.startswith(f"{row.contender} "))
        assert told == whole.removeprefix(row.contender).split()
    assert all(len(line.rstrip()) <= width for line in table if "times as fast" not in line)


def test_texts_wrap_between_words_and_long_names_fold(terminal: Any) -> None:
    written = terminal(60)
    text = "what a person reads wraps between its words, because nobody looks it up by its first half"
    rows = [["a-name-of-24-characters-", text, 12_345_678], ["n" * 90, "short", 1]]
    output.table(("name", "text", "count"), rows, right=("count",))
    lines = written.getvalue().splitlines()
    assert max(map(len, (line.rstrip() for line in lines))) <= 60
    assert "12,345,678" in lines[2] and lines[2].startswith("a-name-of-24-characters-")
    words = re.sub(r"\s+", " ", " ".join(line[34:].strip() for line in lines[2:]))
    assert set(text.split()) <= set(words.split())
    assert "".join(re.findall("n{3,}", written.getvalue())) == "n" * 90


def test_a_table_without_rows_and_one_without_header(terminal: Any) -> None:
    written = terminal(80)
    output.table(("one", "two"), [])
    output.facts({"key": "value " * 30, "a longer key": 3})
    assert "one" in written.getvalue() and "a longer key 3" in written.getvalue()
    assert max(map(len, written.getvalue().splitlines())) <= 80


def test_parts_repeat_the_names() -> None:
    rows = [["row", *["123456789"] * 9]]
    names = ["name", *(f"c{at}" for at in range(9))]
    found = columns.fit(columns.measure(names, rows, set(names)), 40, 2)
    assert [list(part) for part in found] == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]]


CELLS = st.text("abcdefgh-.,0123456789 ", min_size=1, max_size=36).filter(lambda text: text.strip() == text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(CELLS, min_size=6, max_size=6), min_size=1, max_size=4), st.integers(80, 120))
def test_no_word_is_broken(rows: list[list[str]], width: int) -> None:
    """What every command hands to ``output.table``: names, numbers and texts in any order."""
    names = ["name", "a number", "text", "another number", "more", "last"]
    parts = columns.fit(columns.measure(names, rows, {"a number", "another number"}), width, 2)
    shown = set().union(*parts)
    assert shown == set(range(6)) and all(0 in part for part in parts)
    for part in parts:
        assert sum(part.values()) + 2 * (len(part) - 1) <= width
        for row in rows:
            assert all(len(word) <= part[at] for at in part for word in row[at].split())
            assert all(len(row[at]) <= part[at] for at in part if at in (0, 1, 3))
