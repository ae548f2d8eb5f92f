"""Compare: ratios of ratios, and the conditions under which there are any."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvgen.bench import Report
from kvgen.bench.compare import Change, compare, need_comparable, read_report
from kvgen.errors import ArgumentError


def slower(report: Report, factor: float) -> Report:
    """The same report from a machine that is slower by so much: all times and read limits."""

    def figure(data: Any, by: float) -> Any:
        return data and data | {key: data[key] * by for key in ("median", "low", "high")}

    data = report.to_json()
    for case in data["cases"]:
        for row in case["rows"]:
            row["seconds"] = figure(row["seconds"], factor)
        for limit in case["limits"]:
            limit["bytes_per_s"] = figure(limit["bytes_per_s"], 1 / factor)
    return Report.from_json(data)


def test_a_slower_machine_changes_nothing(small_report: Report) -> None:
    found = compare(small_report, slower(small_report, 3.0))
    assert found.changes and all(change.ratio == 1.0 and not change.clear for change in found.changes)
    assert (found.only_old, found.only_new, found.redefined) == ((), (), ())


def test_a_faster_kernel_shows_in_its_rows(small_report: Report) -> None:
    data = small_report.to_json()
    row = data["cases"][0]["rows"][0]
    assert row["spec"]
    row["fraction"] = {key: value * 2 if key != "count" else value for key, value in row["fraction"].items()}
    found = compare(small_report, Report.from_json(data))
    (change,) = [change for change in found.changes if change.ratio != 1.0]
    assert (change.contender, change.what) == (row["contender"], "of read limit")
    assert change.ratio == pytest.approx(2.0)


def test_noise_is_told_from_change() -> None:
    def change(new: float, noise: float) -> Change:
        return Change("case", "kvgen a", "of read limit", 0.5, new, noise)

    assert change(0.55, 0.05).clear
    assert not change(0.55, 0.12).clear
    assert not change(0.503, 0.0).clear


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threads", 64),
        ("cpu", "another"),
        ("protocol", 0),
        ("l3_bytes", 1),
        ("huge_pages", "odd"),
        ("isa", "z"),
    ],
)
def test_other_conditions_are_refused_by_name(small_report: Report, field: str, value: Any) -> None:
    other = dataclasses.replace(small_report.facts, **{field: value})
    with pytest.raises(ArgumentError, match=rf"{field} .*do not compare"):
        need_comparable(small_report.facts, other)


def test_other_software_compares(small_report: Report) -> None:
    need_comparable(small_report.facts, dataclasses.replace(small_report.facts, torch="9.9", kvgen="8"))


def test_rows_of_one_report_only_are_named(small_report: Report) -> None:
    case = small_report.cases[0]
    less = dataclasses.replace(small_report, cases=(dataclasses.replace(case, rows=case.rows[1:]),))
    found = compare(small_report, less)
    assert found.only_old == (f"decode-2x40: {case.rows[0].contender}",)  # of other cases nothing was run now
    assert not found.only_new


def test_disturbed_rows_are_named_and_not_compared(small_report: Report) -> None:
    case = small_report.cases[0]
    rows = (dataclasses.replace(case.rows[0], status="disturbed"), *case.rows[1:])
    other = dataclasses.replace(small_report, cases=(dataclasses.replace(case, rows=rows),))
    found = compare(small_report, other)
    assert found.disturbed == (f"decode-2x40: {case.rows[0].contender}",)
    assert case.rows[0].contender not in {change.contender for change in found.changes}


def test_the_modes_of_the_memory_do_not_compare(small_report: Report) -> None:
    fast = [dataclasses.replace(case, mode="fast") for case in small_report.cases]
    found = compare(small_report, dataclasses.replace(small_report, cases=tuple(fast)))
    assert not found.changes and all("fast mode" in name for name in found.only_new)


def test_a_name_that_stands_for_another_spec_is_told(small_report: Report) -> None:
    name = next(iter(small_report.specs))
    other = dataclasses.replace(small_report, specs={**small_report.specs, name: "0" * 64})
    assert compare(small_report, other).redefined == (name,)


def test_files(small_report: Report, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps(small_report.to_json()))
    assert read_report(str(file)) == small_report
    file.write_text("{")
    with pytest.raises(ArgumentError, match=r"old\.json: no JSON"):
        read_report(str(file))
    file.write_text("[]")
    with pytest.raises(ArgumentError, match=r"old\.json: not a report"):
        read_report(str(file))
