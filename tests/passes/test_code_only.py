"""What counts as the code of a kernel, and what is written for people only."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.passes.code_only import cpp_code, python_code

CPP = """// A heading.
#include <cmath>

constexpr int N = 1'000;  // a count
/* A block
   comment */ int x = N /* here */ + 1;
const char* a = "// no comment, \\" nor /* this";
char c = '"', d = '/';
auto r = R"x(// raw )" /* still raw */)x";
"""

PYTHON = '''"""A heading."""

N = 1  # a count


def f(x):
    """Doc."""
    # why
    asm = "add # no comment"
    return (
        x + N
    )
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// A heading.", "// Another.\n// Heading."),
        ("  // a count", ""),
        ("/* A block\n   comment */ ", " "),
        ("/* here */", "/* there */"),
        ("/* A block\n   comment */ int", "  int"),
        ("\n\n", "\n\n\n"),
    ],
)
def test_cpp_comments_are_no_code(old: str, new: str) -> None:
    assert old in CPP and cpp_code(CPP.replace(old, new)) == cpp_code(CPP)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1'000", "1'001"),
        ("// no comment", "// one"),
        ("nor /* this", "nor /* that"),
        ("// raw", "// RAW"),
        ("/* still raw */", "/* raw */"),
        ("d = '/'", "d = '*'"),
        ("N /* here */ + 1", "N  + 2"),
        ("#include <cmath>", "// #include <cmath>"),
    ],
)
def test_all_other_cpp_is_code(old: str, new: str) -> None:
    assert old in CPP and cpp_code(CPP.replace(old, new)) != cpp_code(CPP)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A heading."""', '"""Another\n\nheading."""'),
        ("  # a count", ""),
        ('    """Doc."""\n', ""),
        ("# why", "# because"),
        ("(\n        x + N\n    )", "(x + N)"),
    ],
)
def test_python_comments_docstrings_and_line_breaks_are_no_code(old: str, new: str) -> None:
    assert old in PYTHON and python_code(PYTHON.replace(old, new)) == python_code(PYTHON)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("N = 1", "N = 2"),
        ("add # no comment", "add # other"),
        ('asm = "add # no comment"', '"add # no comment"'),
        ("    return", "    if x:\n        return"),
    ],
)
def test_all_other_python_is_code(old: str, new: str) -> None:
    assert old in PYTHON and python_code(PYTHON.replace(old, new)) != python_code(PYTHON)


def test_rendered_kernels_keep_their_code(repo_root: Path) -> None:
    """No comment is left, and every line of code that has none stays."""
    for path in sorted((repo_root / "tests/golden").glob("*.cpp")):
        text, code = path.read_text(), cpp_code(path.read_text())
        assert "//" not in code and len(code) < len(text)
        plain = {line.strip() for line in text.splitlines() if "//" not in line and "/*" not in line}
        assert plain - {""} <= set(code.splitlines())
    for path in sorted((repo_root / "tests/golden").glob("*.py")):
        code = python_code(path.read_text())
        assert "spec " not in code and code.count("@ triton . jit") == path.read_text().count("@triton.jit")
