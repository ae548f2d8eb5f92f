"""``kvgen list``: registered things, as text and as JSON."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.commands.listing import SECTIONS
from kvgen.ir.plan import OPS
from kvgen.ir.quant import FORMATS
from kvgen.targets import TARGETS


def test_everything_registered_is_listed(kvgen_json: Any) -> None:
    found = kvgen_json("list")
    assert list(found) == list(SECTIONS)
    assert [row["name"] for row in found["targets"]] == list(TARGETS)
    assert [row["name"] for row in found["formats"]] == list(FORMATS)
    assert [row["name"] for row in found["ops"]] == list(OPS)
    assert {row["template"].partition("/")[0] for row in found["schedules"]} == {"cpp", "triton"}
    assert "examples/llama3-8b-int8.toml" in [row["file"] for row in found["specs"]]


@pytest.mark.parametrize("section", SECTIONS)
def test_one_section(kvgen: Any, kvgen_json: Any, section: str) -> None:
    rows = kvgen_json("list", section)[section]
    text = kvgen("list", section).stdout
    for row in rows:
        assert str(next(iter(row.values()))) in text


def test_targets_say_where_they_run(kvgen_json: Any) -> None:
    here = {row["name"]: row["runs here"] for row in kvgen_json("list", "targets")["targets"]}
    assert here["cpu-portable"].startswith("yes")
    assert [name for name, text in here.items() if text == "yes, as cpu"] != []
    assert here["sm_90"] == "with the GPU"


def test_defaults_are_among_the_values(kvgen_json: Any) -> None:
    for row in kvgen_json("list", "schedules")["schedules"]:
        assert row["default"] in row["values"].split(), row


def test_unknown_section(kvgen: Any, kvgen_json: Any) -> None:
    result = kvgen("list", "kernels")
    assert result.exit_code == 2
    assert "targets, formats, ops, specs, schedules" in result.stderr
    assert kvgen_json("list", "kernels", exit_code=2)["error"]["type"] == "ArgumentError"
