"""columns: how a table fits the width of a terminal: texts wrap between words, names and numbers stay whole.

What does not fit beside one another follows below, under the names of the rows once more.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

NAME = 36
"""Characters up to which the first column, the names of the rows, stays on one line."""

WORD = 40
"""Characters up to which a word stays on one line: a longer one, a path for example, may be folded."""


@dataclass(frozen=True)
class Column:
    """One column: its header's text, its cells, and how narrow it may get."""

    index: int
    least: int
    most: int


def measure(columns: Sequence[str], rows: Sequence[Sequence[str]], whole: Set[str]) -> list[Column]:
    """The columns of a table. Those named in ``whole`` hold numbers, whose cells never wrap."""
    count = len(columns) or max((len(row) for row in rows), default=0)
    found = []
    for at in range(count):
        header = columns[at] if columns else ""
        cells = [row[at] for row in rows]
        most = max(map(len, [header, *cells]))
        if at == 0:
            least = min(NAME, most)
        elif header in whole:
            least = max([_word(header), *map(len, cells)])
        else:
            least = max(min(_word(text), WORD) for text in [header, *cells])
        found.append(Column(at, least, most))
    return found


def fit(columns: Sequence[Column], width: int, gap: int) -> list[dict[int, int]]:
    """Widths by column, for each part of a table that stands ``gap`` apart on lines of ``width``.

    Every part after the first one begins with the table's first column.
    """
    if not columns:
        return []
    first, parts = columns[0], [[columns[0]]]
    for column in columns[1:]:
        beside = [*parts[-1], column]
        if len(parts[-1]) > 1 and _room(beside, width, gap) < 0:
            parts.append([first, column])
        else:
            parts[-1] = beside
    return [_share(part, width, gap) for part in parts]


def _room(columns: Sequence[Column], width: int, gap: int) -> int:
    """What is left of a line where every column is as narrow as it may be."""
    return width - sum(column.least for column in columns) - gap * (len(columns) - 1)


def _share(columns: Sequence[Column], width: int, gap: int) -> dict[int, int]:
    """Each column's width: what it needs, and where there is less, the widest give way first."""
    widths = {column.index: column.most for column in columns}
    least = {column.index: column.least for column in columns}
    surplus = sum(widths.values()) + gap * (len(columns) - 1) - width
    while surplus > 0:
        wide = [index for index in widths if widths[index] > least[index]]
        if not wide:  # one word is wider than the terminal, which then folds it
            break
        widths[max(wide, key=lambda index: widths[index])] -= 1
        surplus -= 1
    return widths


def _word(text: str) -> int:
    """The longest word of a text."""
    return max(map(len, text.split()), default=0)
