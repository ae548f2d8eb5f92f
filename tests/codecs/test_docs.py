"""docs/codecs.md: its samples run, and its table knows every codec."""

from __future__ import annotations

import re
from pathlib import Path

from kvgen.ir import codec as registry
from kvgen.ir.codec import CODECS
from kvgen.passes.validate import load_spec
from tests.support.documents import blocks

ATTENTION = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}


def test_its_definitions_register_and_make_specs() -> None:
    before = set(CODECS)
    try:
        for sample in blocks("docs/codecs.md", "python"):
            exec(sample, {})  # noqa: S102
        own = set(CODECS) - before
        assert own == {"fifths", "e3m4"}
        for name in own:
            k = {"format": name, **CODECS[name].example}
            load_spec({"attention": ATTENTION, "cache": {"page_size": 16, "k": k, "v": k}})
    finally:
        for name in set(CODECS) - before:
            registry.CODECS.pop(name)


def test_its_spec_loads() -> None:
    import tomllib

    (text,) = blocks("docs/codecs.md", "toml")
    k = tomllib.loads(text)["cache"]["k"]
    load_spec({"attention": ATTENTION, "cache": {"page_size": 32, "k": k, "v": {"format": "int8"}}})


def test_its_table_knows_every_codec(repo_root: Path) -> None:
    named = set(re.findall(r"`(\w+)`", (repo_root / "docs/codecs.md").read_text()))
    assert CODECS.keys() <= named
