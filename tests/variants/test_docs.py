"""docs/variants.md does what it says: its spec, its messages, its bounds and its definitions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvgen.variants
from kvgen.definitions import GROUP
from kvgen.errors import SpecError
from kvgen.ir import Spec
from kvgen.passes.parse import FUNCTIONS
from kvgen.passes.terms import POSITIONS, masking, scoring
from kvgen.passes.validate import load_spec, validate
from kvgen.variants import Definition, Position, definition, positions, registered
from tests.support import documents

TEXT = (Path(__file__).parents[2] / "docs" / "variants.md").read_text()


def blocks(language: str) -> list[str]:
    return documents.blocks("docs/variants.md", language)


@pytest.fixture
def own_entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Definition | Position]]:
    """What the document's Python registers, known until the test ends."""
    found: list[Definition | Position] = []
    monkeypatch.setattr(kvgen.variants, "register", found.append)
    scope: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "docs/variants.md", "exec"), scope)  # noqa: S102 - text of this project
    with registered(*found):
        yield found


def spec_of(tmp_path: Path) -> Spec:
    toml = blocks("toml")[0]
    (tmp_path / "own.toml").write_text(toml)
    return load_spec(tmp_path / "own.toml")


def test_the_entry_points_are_of_the_group_that_is_read() -> None:
    assert tomllib.loads(blocks("toml")[1])["project"]["entry-points"].keys() == {GROUP}


def test_the_spec(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert [p.name for p in spec.attention.params] == ["lead", "slope"]
    assert scoring(spec) is not None
    assert [p.name for p in masking(spec).params] == ["lead"]


@pytest.mark.parametrize("line", blocks("text")[0].splitlines())
def test_the_messages(line: str, tmp_path: Path) -> None:
    raw = spec_of(tmp_path).to_dict()
    match = re.fullmatch(r"attention\.(score|mask) = ('[^']*'|\"[^\"]*\"): .*", line)
    assert match, line
    raw["attention"][match[1]] = match[2][1:-1]
    with pytest.raises(SpecError) as caught:
        validate(raw)
    assert line in str(caught.value)


def test_every_name_and_function_is_explained() -> None:
    language = TEXT[TEXT.index("## The language") : TEXT.index("## Which keys")]
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", language))))
    assert {*POSITIONS, *FUNCTIONS, "score"} <= words


BOUNDS = TEXT[TEXT.index("| mask | keys of a block") : TEXT.index("So keep what bounds")]


@pytest.mark.parametrize("mask", re.findall(r"^\| `([^`]*)`", BOUNDS, re.MULTILINE))
def test_what_bounds_bounds(mask: str, tmp_path: Path) -> None:
    """The column that says `all` is right, and the others hold a bound."""
    raw = spec_of(tmp_path).to_dict()
    del raw["attention"]["score"]
    declared = {"lead": {"dims": ["batch"], "dtype": "i32"}, "shown": {"dims": ["q", "kv"], "dtype": "bits"}}
    params = {name: param for name, param in declared.items() if name in mask}
    raw["attention"] |= {"causal": False, "mask": mask, "params": params}
    found = masking(validate(raw))
    row = next(line for line in BOUNDS.splitlines() if f"`{mask}`" in line)
    keys, full = (cell.strip() for cell in row.split(" | ")[-2:])
    assert (found.lo is None and found.hi is None) == keys.startswith("all")
    assert found.never_full == full.startswith("none")


def test_the_definitions(own_entries: list[Definition | Position], tmp_path: Path) -> None:
    assert [entry.name for entry in own_entries] == ["dilation", "recency", "ntk"]
    raw = spec_of(tmp_path).to_dict()
    raw["attention"] |= {**definition("dilation").example, **definition("recency").example}
    raw["attention"]["rope"] = {"kind": "ntk", **positions()["ntk"].example}
    spec = validate(raw)
    assert spec.attention.rope is not None
    assert "every 3-th key" in masking(spec).words
    terms = scoring(spec)
    assert terms is not None
    assert [p.name for p in terms.params] == ["rate", "slope"]
    frequencies, factor = positions()["ntk"].frequencies(spec.attention.rope)
    plain, _ = positions()["default"].frequencies(spec.attention.rope)
    assert factor == 1.0
    assert frequencies[0] == plain[0]
    assert frequencies[-1] == pytest.approx(plain[-1] / 4.0)
