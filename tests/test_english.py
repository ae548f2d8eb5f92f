"""What people read: words that made them stop are not used again."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

STUMBLES = {
    r"as (it|they) came\b": "left unquantised, or as given",
    r"\b(elements|keys|rows|K|q)( that)? (are |is |comes? )?turn(s|ed)?\b(?! (on|off|into))": "rotated",
    r"\bturned (by|to) (its|the)\b": "rotated",
    r"\bnobody's\b": "nothing reads it",
    r"\blay a death\b": "say which candidate crashed",
    r"\bexist and were not\b": "not written by ..., or edited since",
    r"not true or false": "not a boolean",
    r"index to the next": "one token to the next",
}
"""Pattern -> what to write instead."""

PLACES = ("README.md", "docs", "examples", "templates", "kvgen", "runtime")


def texts(path: Path) -> list[str]:
    """What a file says: of Python its strings, docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [text]
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [*strings, *re.findall(r"(?m)(?:^|\s)#.*$", text)]


@pytest.mark.parametrize("pattern", list(STUMBLES))
def test_no_stumbles(pattern: str, repo_root: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", *PLACES], cwd=repo_root, capture_output=True, text=True, check=True
    ).stdout.split()
    found = [
        f"{name}: ...{text[max(0, hit.start() - 40) : hit.end() + 20]}...".replace("\n", " ")
        for name in listed
        if name.endswith((".py", ".md", ".toml", ".jinja"))
        for text in texts(repo_root / name)
        for hit in re.finditer(pattern, text)
    ]
    assert not found, f"write {STUMBLES[pattern]!r}: " + "\n".join(found)
