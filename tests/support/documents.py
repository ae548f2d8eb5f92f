"""The samples in the documents of this project."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(document: str, language: str) -> list[str]:
    """Texts of the fenced blocks of a language in ``README.md`` or ``docs/...``, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def commands(document: str) -> list[str]:
    """Lines of shell of a document, fenced or indented, without their comments."""
    text = (ROOT / document).read_text()
    fenced = [line for block in blocks(document, "sh") for line in block.splitlines()]
    indented = re.findall(r"^    ((?:kvgen|pip|make|pytest) .*)$", text, re.MULTILINE)
    parts = [
        part for line in (*fenced, *indented) for part in re.split(r" && | ; ", re.sub(r"\s+# .*", "", line))
    ]
    return [part.strip() for part in parts if part.strip()]


def in_table(document: str) -> list[str]:
    """Commands that begin the rows of a document's tables."""
    rows = re.findall(r"^\| (`kvgen .*?) \|", (ROOT / document).read_text().replace(r"\|", "/"), re.MULTILINE)
    return [command for row in rows for command in re.findall(r"`([^`]*)`", row)]
