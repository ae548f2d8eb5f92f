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
from kvgen.variants import Definition, Formula, Position, attention_fields, positions, registered
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


@pytest.mark.parametrize("table", ["ATTENTION", "CACHE", "QUANT", "PARAM", "ROPE"])
def test_schema_says_what_the_rules_say(table: str) -> None:
    """Each bound of the schema is where the rule's own check turns."""
    part = spec_schema()["properties"]
    found = {
        "ATTENTION": part["attention"],
        "CACHE": part["cache"],
        "QUANT": part["cache"]["properties"]["k"]["oneOf"][0],
        "PARAM": part["attention"]["properties"]["params"]["additionalProperties"],
        "ROPE": part["attention"]["properties"]["rope"],
    }[table]
    rules = fields.quant_fields() if table == "QUANT" else getattr(fields, table)
    if table == "ATTENTION":
        rules = attention_fields()
    elif table == "ROPE":
        rules = rules | {
            name: rule for scheme in positions().values() for name, rule in scheme.fields.items()
        }
    assert list(found["properties"]) == list(rules)
    for name, rule in rules.items():
        said = found["properties"][name]
        if "minimum" in said:
            low, high, step = said["minimum"], said["maximum"], said.get("multipleOf", 1)
            below, above = (low / 2, high * 2) if said["type"] == "number" else (low - step, high + step)
            assert rule.check(low) is None and rule.check(high) is None
            assert rule.check(below) and rule.check(above)
        for value in said.get("enum", ()):
            assert rule.check(value) is None


def test_schema_knows_registered_keys() -> None:
    """Masks, scores and position schemes come from the registry, one of a test's own too."""
    mask = Definition(
        "every_other",
        "mask",
        fields.Field(fields.SWITCH, "true, or leave it out", None),
        "every other key",
        "this test",
        lambda value, q_heads: Formula("kv_pos % 2 == 0"),
        {"every_other": True},
    )
    scheme = Position("still", {"speed": fields.Field(fields.FACTOR, "1.0")}, "", "", lambda rope: ([], 1.0))
    spec: dict[str, Any] = {
        "attention": {
            "q_heads": 8, "kv_heads": 1, "head_dim": 64, "every_other": True, "alibi": True, "soft_cap": 5.0,
            "params": {"slope": {"dims": ["head"]}}, "rope": {"kind": "still", "speed": 2.0},
        },
        "cache": {"page_size": 16, "k": {"format": "bf16"}, "v": {"alias": "k"}},
    }  # fmt: skip
    assert _mistakes(spec_schema(), spec) == [
        "every_other unknown",
        "kind: 'still' is no choice",
        "speed unknown",
    ]
    with registered(mask, scheme):
        assert _mistakes(spec_schema(), spec) == []
    spec["cache"]["v"] = {"alias": "q"}
    spec["attention"]["params"]["slope"] = {"dtype": "f64"}
    assert {"dims missing", "dtype: 'f64' is no choice", "alias: 'q' is no choice"} <= set(
        _mistakes(spec_schema(), spec)
    )


def test_terms_in_words(kvgen: Any, kvgen_json: Any, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        """
        [attention]
        q_heads = 8
        kv_heads = 1
        head_dim = 192
        v_head_dim = 128
        window = 33
        soft_cap = 50.0
        sink_logit = true
        score = "score - slope[head] * abs(q_pos - kv_pos)"
        [attention.params]
        slope = { dims = ["head"] }
        [attention.rope]
        kind = "linear"
        factor = 4.0
        dim = 64
        pairing = "interleaved"
        [cache]
        page_size = 16
        k = { format = "bf16" }
        v = { alias = "k" }
        """
    )
    rows = dict(line.split("  ", 1) for line in kvgen("show", spec).stdout.splitlines() if "  " in line)
    told = {name: text.strip() for name, text in rows.items()}
    assert told["masks"] == "causal, aligned to the last key; window of 33 earlier keys"
    assert told["scores"] == (
        "scale 0.0721688 times q.k; score - slope[head] * abs(q_pos - kv_pos); soft cap at 50.0; "
        "a sink for each head"
    )
    assert told["parameters"] == "sink_logit [head] f32; slope [head] f32"
    assert told["positions"] == (
        "linear rope of theta 10,000, factor 4.0 in pairs of neighbours rotates the first 64 elements of K "
        "when it is appended"
    )
    assert told["V"] == "the first 128 elements of K's rows"
    data = kvgen_json("show", spec)
    assert [term["key"] for term in data["terms"]] == ["causal", "window", "score", "soft_cap", "sink_logit"]
    assert data["bytes"]["payload"] == 16 * 192 * 2 and data["bytes"]["smaller_than_bf16"] == 1


def _mistakes(schema: dict[str, Any], value: Any) -> list[str]:
    """A validator for the few words of JSON Schema that spec_schema uses."""
    if "oneOf" in schema:
        return min((_mistakes(each, value) for each in schema["oneOf"]), key=len)
    if schema.get("type") == "object":
        found = [f"{name} missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if not inner:
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
