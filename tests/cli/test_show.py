"""``kvgen show``: the validated spec, the page record, the schema."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvgen
from kvgen.commands.describe import bytes_data
from kvgen.commands.picture import page_picture
from kvgen.commands.schema import spec_schema
from kvgen.passes import fields
from kvgen.passes.place import place
from tests.support.specs import LAYOUTS, make_spec

INT8 = "examples/llama3-8b-int8.toml"


def test_json_reads_back(kvgen_json: Any, repo_root: Path) -> None:
    data = kvgen_json("show", INT8)
    spec = kvgen.load_spec(data["spec"])
    assert spec.hash == data["hash"] == kvgen.load_spec(repo_root / INT8).hash
    assert [plane["name"] for plane in data["record"]["planes"]] == ["k", "k_scale", "v", "v_scale"]
    assert data["bytes"] == {
        "page": 33792,
        "payload": 33792,
        "padding": 0,
        "padding_percent": 0.0,
        "token": 2112.0,
        "bf16_token": 4096,
        "smaller_than_bf16": 1.939,
    }


def test_text_names_the_facts(kvgen: Any) -> None:
    text = kvgen("show", INT8).stdout
    for fact in ("24a5bc15", "33,792 bytes", "1.94 times smaller", "one f32 scale per head and token"):
        assert fact in text
    assert max(map(len, text.splitlines())) <= 80


def test_padding_is_counted() -> None:
    spec = make_spec(format_k="int8-token", format_v="int8-token", head_dim=72, kv_heads=1, page_size=5)
    found = bytes_data(spec, place(spec))
    assert found["payload"] == 2 * 5 * (72 + 4)
    assert found["padding"] == found["page"] - found["payload"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_picture_accounts_for_every_byte(layout: str, head_dim: int) -> None:
    """The boxes of each stretch start at 0, follow one another and name every plane once."""
    spec = make_spec("int8-token", "bf16", layout, head_dim=head_dim, page_size=16)
    record = place(spec)
    lines = list(page_picture(record))
    assert max(map(len, lines)) <= 100
    labels = [line.split("|")[1].strip() for line in lines if line.count("|") == 2]
    assert sorted(label for label in labels if label not in ("", "(padding)") and "." not in label) == sorted(
        plane.name for plane in record.planes
    )
    for stretch in "\n".join(lines).split("pool ")[1:]:
        starts = [int(line.split()[0].replace(",", "")) for line in stretch.splitlines() if "+-" in line]
        assert starts[0] == 0 and starts == sorted(starts) and len(set(starts)) == len(starts)


def test_schema_of_the_spec_file(kvgen: Any, repo_root: Path) -> None:
    schema = json.loads(kvgen("show", "--schema").stdout)
    assert schema["properties"]["attention"]["required"] == ["q_heads", "kv_heads", "head_dim"]
    for path in (repo_root / "examples").glob("*.toml"):
        assert _mistakes(schema, tomllib.loads(path.read_text())) == []
    assert _mistakes(schema, {"attention": {"q_heads": "8", "head_size": 64}, "cache": {}}) == [
        "kv_heads missing", "head_dim missing", "q_heads: not integer", "head_size unknown",
        "page_size missing", "k missing", "v missing",
    ]  # fmt: skip


@pytest.mark.parametrize("table", ["ATTENTION", "CACHE", "QUANT"])
def test_schema_says_what_the_rules_say(table: str) -> None:
    """Each bound of the schema is where the rule's own check turns."""
    part = spec_schema()["properties"]
    found = {
        "ATTENTION": part["attention"],
        "CACHE": part["cache"],
        "QUANT": part["cache"]["properties"]["k"],
    }[table]
    rules = getattr(fields, table)
    assert list(found["properties"]) == list(rules)
    for name, rule in rules.items():
        said = found["properties"][name]
        if "minimum" in said:
            step = said.get("multipleOf", 1)
            assert rule.check(said["minimum"]) is None and rule.check(said["maximum"]) is None
            assert rule.check(said["minimum"] - step) and rule.check(said["maximum"] + step)
        for value in said.get("enum", ()):
            assert rule.check(value) is None


def _mistakes(schema: dict[str, Any], value: Any) -> list[str]:
    """A validator for the few words of JSON Schema that spec_schema uses."""
    if schema.get("type") == "object":
        found = [f"{name} missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            inner = schema["properties"].get(name)
            if inner is None:
                found.append(f"{name} unknown")
            elif inner.get("type") == "object":
                found += _mistakes(inner, item)
            elif inner.get("type") == "integer" and type(item) is not int:
                found.append(f"{name}: not integer")
            elif "enum" in inner and item not in inner["enum"]:
                found.append(f"{name}: {item!r} is no choice")
        return found
    return []


def test_spec_or_schema_is_needed(kvgen: Any) -> None:
    result = kvgen("show")
    assert result.exit_code == 2 and "SPEC is missing" in result.stderr
