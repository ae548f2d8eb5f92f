"""compare: two reports of one machine, row by row, as ratios of ratios: drift of the machine cancels."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from kvgen import bounded
from kvgen.bench.facts import Facts
from kvgen.bench.report import DISTURBED, OK, CaseReport, Report, Row
from kvgen.bench.stats import Figure
from kvgen.errors import ArgumentError

SAME = ("protocol", "cpu", "cores", "isa", "l3_bytes", "huge_pages", "threads")
"""Facts in which two reports must agree."""


@dataclass(frozen=True)
class Change:
    """One figure of one row, then and now."""

    case: str
    contender: str
    what: str
    """``of read limit``, or ``over`` a spec of kvgen's."""
    old: float
    new: float
    noise: float
    """Spread of both, added: a change below it says nothing."""

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old

    @property
    def clear(self) -> bool:
        """Whether it is more than noise."""
        return abs(self.ratio - 1) > max(self.noise, 0.01)


@dataclass(frozen=True)
class Comparison:
    """What changed between two reports."""

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    """Rows, as ``case: contender``, that only the old report has; of cases that both have."""
    only_new: tuple[str, ...]
    disturbed: tuple[str, ...]
    """Rows that have too few samples in one of them to be compared."""
    redefined: tuple[str, ...]
    """Specs whose name stands for another spec now."""


def read_report(path: str) -> Report:
    """The report in a file that ``--json`` wrote. Raises ``ArgumentError`` for another file."""
    try:
        data = bounded.read_json(path)
    except ValueError as error:
        raise ArgumentError(f"{path}: no JSON ({error})") from None
    try:
        return Report.from_json(data)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def need_comparable(old: Facts, new: Facts) -> None:
    """Raise ``ArgumentError`` that names what differs where two reports do not compare."""
    before, now = old.to_json(), new.to_json()
    differing = [
        f"{name} {before[name]!r} then, {now[name]!r} now" for name in SAME if before[name] != now[name]
    ]
    if differing:
        raise ArgumentError(
            f"--compare: {'; '.join(differing)}; figures of different conditions do not compare"
        )


def compare(old: Report, new: Report) -> Comparison:
    """Every figure that both have. Raises ``ArgumentError`` where machines, threads or protocols differ."""
    need_comparable(old.facts, new.facts)
    cases = {case.case for case in old.cases} & {case.case for case in new.cases}
    before, now = _rows(old, cases), _rows(new, cases)
    both = {key: (before[key], now[key]) for key in now if key in before}
    good = {key: pair for key, pair in both.items() if all(row.status == OK for row in pair)}
    return Comparison(
        changes=tuple(change for key, pair in good.items() for change in _changes(key, *pair)),
        only_old=tuple(_title(key) for key in before if key not in now),
        only_new=tuple(_title(key) for key in now if key not in before),
        disturbed=tuple(_title(key) for key in both if key not in good),
        redefined=tuple(name for name, spec in new.specs.items() if old.specs.get(name, spec) != spec),
    )


Key = tuple[str, str, str, str | None]
"""Attention, case, contender, and the memory's mode: the modes do not compare either."""


def _rows(report: Report, cases: Set[str]) -> dict[Key, Row]:
    found = ((case, row) for case in report.cases if case.case in cases for row in case.rows)
    return {_key(case, row): row for case, row in found if row.status in (OK, DISTURBED)}


def _key(case: CaseReport, row: Row) -> Key:
    return case.shape, case.case, row.contender, case.mode


def _title(key: Key) -> str:
    return f"{key[1]}: {key[2]}{f' ({key[3]} mode)' if key[3] else ''}"


def _changes(key: Key, old: Row, new: Row) -> Iterator[Change]:
    _, case, contender, _ = key
    if new.spec is not None and old.fraction and new.fraction:
        yield _change(case, contender, "of read limit", old.fraction, new.fraction)
    for name, ratio in new.ratios.items():
        if name != new.spec and name in old.ratios:
            yield _change(case, contender, f"over {name}", old.ratios[name], ratio)


def _change(case: str, contender: str, what: str, old: Figure, new: Figure) -> Change:
    return Change(case, contender, what, old.median, new.median, old.spread + new.spread)
