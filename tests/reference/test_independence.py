"""The oracle decides by itself: what it takes from the rest of kvgen is listed, and no helper is among it.

A rule that oracle and compiler share is a fault that nobody sees: both once took a window of 0 for none, and
``kvgen verify`` proved every kernel. Nouns may be shared (what a spec says), verbs may not.
"""

from __future__ import annotations

import ast
from pathlib import Path

SHARED = {
    "kvgen.errors": {"ArgumentError"},
    "kvgen.ir": {"AttentionSpec", "PageRecord", "QuantSpec", "RopeSpec", "Segment", "Spec"},
    "kvgen.ir.codec": {"CODECS", "Codec", "float_value"},
    "kvgen.ir.quant": {"CodePlane", "ZERO_BLOCK_AMAX"},
    "kvgen.variants": {"Definition", "Formula", "definitions"},
}
"""Names by module. ``float_value`` is what OCP says a code is worth (tested against torch and by hand);
``definitions`` gives the texts of masks and scores, which the oracle walks by itself."""


def taken(folder: Path) -> dict[str, set[str]]:
    """Names that the files of the oracle import from elsewhere in kvgen, by module."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("kvgen")]
                assert not names, f"{path.name} imports {names} whole"
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvgen"):
                found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return {name: names for name, names in found.items() if not name.startswith("kvgen.reference")}


def test_what_the_oracle_takes_from_the_compiler_is_listed(repo_root: Path) -> None:
    assert taken(repo_root / "kvgen" / "reference") == SHARED


def test_the_oracle_asks_no_spec_what_is_switched_on(repo_root: Path) -> None:
    """``option`` and ``sink`` are the compiler's way of asking; the oracle looks at what the spec says."""
    for path in sorted((repo_root / "kvgen" / "reference").glob("*.py")):
        asked = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not asked & {"option", "switched_on"}, path.name
