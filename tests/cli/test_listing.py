"""``kvgen list``: registered things, as text and as JSON."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.commands.listing import SECTIONS
from kvgen.ir.plan import OPS, Constant
from kvgen.ir.quant import FORMATS
from kvgen.passes.fields import TABLE, Field
from kvgen.targets import TARGETS
from kvgen.variants import Definition, Formula, definitions, positions, registered


def test_everything_registered_is_listed(kvgen_json: Any) -> None:
    found = kvgen_json("list")
    assert list(found) == list(SECTIONS)
    assert [row["name"] for row in found["targets"]] == list(TARGETS)
    assert [row["name"] for row in found["formats"]] == list(FORMATS)
    assert [row["name"] for row in found["masks"]] == [d.name for d in definitions("mask")]
    assert [row["name"] for row in found["scores"]] == [d.name for d in definitions("score")]
    assert [row["name"] for row in found["sinks"]] == [d.name for d in definitions("sink")]
    assert [row["name"] for row in found["positions"]] == list(positions())
    assert [row["name"] for row in found["ops"]] == list(OPS)
    assert {row["template"].partition("/")[0] for row in found["schedules"]} == {"cpp", "triton"}
    assert "examples/llama3-8b-int8.toml" in [row["file"] for row in found["specs"]]


@pytest.mark.parametrize("section", SECTIONS)
def test_one_section(kvgen: Any, kvgen_json: Any, section: str) -> None:
    rows = kvgen_json("list", section)[section]
    text = kvgen("list", section).stdout
    for row in rows:
        assert str(next(iter(row.values()))) in text


def test_a_definition_says_what_it_means(kvgen_json: Any) -> None:
    """Its expression for its example, and what a call must bring."""
    rows = {row["name"]: row for row in kvgen_json("list", "masks")["masks"]}
    assert rows["window"]["means"] == "kv_pos + WINDOW >= q_pos"
    assert rows["bool_mask"]["example"] == 'causal = false, bool_mask = "bits"'
    assert rows["bool_mask"]["parameters"] == "bool_mask [q, kv] bits"


def test_a_definition_registered_now_is_listed(kvgen_json: Any) -> None:
    score = Definition(
        "lifted",
        "score",
        Field(TABLE, "{ by = 1 }", None),
        "some more",
        "this test",
        lambda value, q_heads: Formula("score + BY", (Constant("BY", dict(value)["by"]),)),
        {"lifted": {"by": 2}},
        order=5,
    )
    with registered(score):
        row = kvgen_json("list", "scores")["scores"][0]
    assert row == {
        "name": "lifted",
        "what": "some more",
        "example": "lifted = { by = 2 }",
        "means": "score + BY",
        "parameters": "",
        "from": "this test",
    }
    assert "lifted" not in [row["name"] for row in kvgen_json("list", "scores")["scores"]]


def test_targets_say_where_they_run(kvgen_json: Any) -> None:
    here = {row["name"]: row["runs here"] for row in kvgen_json("list", "targets")["targets"]}
    assert here["cpu-portable"].startswith("yes")
    assert [name for name, text in here.items() if text == "yes, as cpu"] != []
    assert here["sm_90"] == "with the GPU"


def test_defaults_are_among_the_values(kvgen_json: Any) -> None:
    for row in kvgen_json("list", "schedules")["schedules"]:
        assert row["default"] in row["values"].split(), row


@pytest.mark.parametrize(
    ("name", "title"), [("codecs", "Formats"), ("dtypes", "Formats"), ("gpus", "Targets"), ("kernels", "Ops")]
)
def test_other_words_for_a_section(kvgen: Any, name: str, title: str) -> None:
    result = kvgen("list", name)
    assert result.exit_code == 0 and result.stdout.lstrip().startswith(title)


def test_the_nearest_section_is_told(kvgen: Any) -> None:
    assert "list fromats: no such list; did you mean formats? There are" in kvgen("list", "fromats").stderr


def test_unknown_section(kvgen: Any, kvgen_json: Any) -> None:
    result = kvgen("list", "flowers")
    assert result.exit_code == 2
    assert "targets, formats, masks, scores, sinks, positions, ops, specs, schedules" in result.stderr
    assert kvgen_json("list", "flowers", exit_code=2)["error"]["type"] == "ArgumentError"
