"""docs/trust.md: each check that it lists is held by a test, and the bounds that it states are the code's."""

from __future__ import annotations

import re
from pathlib import Path

from kvgen import bounded
from kvgen.passes import check_attention
from kvgen.runtime import manifest
from kvgen.tune import store


def test_each_check_is_held_by_a_test(repo_root: Path) -> None:
    text = (repo_root / "docs" / "trust.md").read_text()
    rows = re.findall(r"^\| (?!what \|)(?!---)(.+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    there = set()
    for path in (repo_root / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    assert len(rows) == text.count("`test_") >= 13
    assert {name.strip("`") for _, _, name in rows} <= there


def test_it_states_the_bounds_of_the_code(repo_root: Path) -> None:
    text = " ".join((repo_root / "docs" / "trust.md").read_text().split())
    spec = (
        f"at most {bounded.TOML_BYTES >> 10} KiB, {bounded.DEEPEST} brackets around a value, "
        f"{bounded.MOST_PARTS} parts between dots and {check_attention.MOST_PARAMS} parameters"
    )
    files = (
        f"at most {store.MOST_BYTES >> 20} MiB, a manifest {manifest.MOST_MANIFEST >> 20} MiB, "
        f"a binary {manifest.MOST_FILE >> 30} GiB"
    )
    assert spec in text and files in text


def test_the_readme_leads_there(repo_root: Path) -> None:
    assert "(docs/trust.md)" in (repo_root / "README.md").read_text()
