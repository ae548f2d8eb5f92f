"""code_only: the code of a rendered kernel, without what is written for people.

Comments and docstrings change no machine code, so a kernel that was compiled or raced stays known when only
they are mended. Read with each language's own lexical rules: what looks like a comment inside a string stays.
"""

from __future__ import annotations

import io
import re
import tokenize

_COMMENT = r"//(?:\\\n|[^\n])*|/\*.*?\*/"
_COMMENTS = re.compile(_COMMENT, re.DOTALL)
_CPP = re.compile(
    rf"""
      (?:u8|[uUL])?R"(?P<fence>[^()\\\s]{{0,16}})\(.*?\)(?P=fence)"   # raw string
    | "(?:\\.|[^"\\\n])*"                                             # string
    | '(?:\\.|[^'\\\n])+'                                             # character
    | [A-Za-z_]\w*
    | \.?\d(?:[eEpP][+-]|'?[\w.])*                                    # number: 1'000 holds no character
    | (?P<gap> (?:\s|{_COMMENT})+ )
    """,
    re.VERBOSE | re.DOTALL,
)

_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
_MARKS = {tokenize.NEWLINE: "\n", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
"""Tokens that structure Python by their kind; their text depends on formatting."""


def cpp_code(text: str) -> str:
    """C++ without comments and indentation; blanks and comments between two tokens count as one blank."""
    return _CPP.sub(_gap, text).strip()


def _gap(found: re.Match[str]) -> str:
    if found["gap"] is None:
        return found[0]
    return "\n" if "\n" in _COMMENTS.sub(" ", found["gap"]) else " "


def python_code(text: str) -> str:
    """The tokens of a Python module, a line a statement, without comments and docstrings.

    Not Python any more: a form in which two modules are equal exactly when their code is.
    """
    words: list[str] = []
    fresh = True  # whether a statement begins here
    found = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in _LAYOUT]
    skip = False
    for token, after in zip(found, [*found[1:], None], strict=True):
        alone = after is None or after.type == tokenize.NEWLINE
        if fresh and token.type == tokenize.STRING and alone:
            skip = True
        elif token.type == tokenize.NEWLINE and skip:
            skip = False
        else:
            words.append(_MARKS.get(token.type, token.string))
        fresh = token.type in _MARKS
    return " ".join(words)
