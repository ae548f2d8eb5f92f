"""The language of masks and scores: what it means, and that everything else is refused by its column."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.ir import Param
from kvgen.ir.expression import Load, Name, Node, Number, Op, Truth
from kvgen.passes.parse import FUNCTIONS, ExpressionError, parse
from tests.support.expressions import NAMES, PARAMS, evaluate, read

KV, Q, SCORE = Name("kv_pos"), Name("q_pos"), Name("score")


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("kv_pos <= q_pos", Op("<=", (KV, Q))),
        ("score / 2", Op("/", (SCORE, Number(2)))),
        ("-3", Number(-3)),
        ("True", Truth(True)),
        ("shown[q_row, kv_pos]", Load("shown", (Name("q_row"), KV), "bool")),
        ("doc[batch, q_pos]", Load("doc", (Name("batch"), Q), "int")),
        ("min(1, 2, 3)", Op("min", (Op("min", (Number(1), Number(2))), Number(3)))),
        ("0 <= kv_pos < 5", Op("and", (Op("<=", (Number(0), KV)), Op("<", (KV, Number(5)))))),
        (
            "(kv_pos < 3) & ~(q_pos > 2)",
            Op("and", (Op("<", (KV, Number(3))), Op("not", (Op(">", (Q, Number(2))),)))),
        ),
        ("(kv_pos < 3) ^ True", Op("!=", (Op("<", (KV, Number(3))), Truth(True)))),
        (" kv_pos\n  % 4", Op("%", (KV, Number(4)))),
    ],
)
def test_texts_are_read_as(text: str, node: Node) -> None:
    assert read(text) == node


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("q_pos + 1", "int"),
        ("q_pos + 1.0", "float"),
        ("q_pos / 2", "float"),
        ("q_pos // 2", "int"),
        ("where(q_pos < 2, 1, 2.5)", "float"),
        ("where(q_pos < 2, q_pos < 3, False)", "bool"),
        ("exp2(q_pos)", "float"),
        ("int(score)", "int"),
        ("float(q_pos < 2)", "float"),
        ("slope[head]", "float"),
        ("lead[batch]", "int"),
        ("tree[q_row] >> 3 & 1", "int"),
    ],
)
def test_types(text: str, kind: str) -> None:
    assert read(text).type == kind


def test_python_agrees_on_precedence() -> None:
    """The oracle walks the same grammar: what binds tighter must be the same."""
    values = {"q_pos": -7, "kv_pos": 5, "kv_len": 11, "q_len": 3, "head": 2}
    for text, value in [
        ("-q_pos // 3 * 2 - kv_pos % 3", 7 // 3 * 2 - 5 % 3),
        ("q_pos // 3 + q_pos % 3", -3 + 2),
        ("kv_pos & 3 == 1", True),
        ("1 << head + 1", 8),
        ("not kv_pos < 3 and q_pos < 0 or kv_len == 0", True),
    ]:
        assert evaluate(read(text), values) == value, text


@pytest.mark.parametrize(
    ("text", "column", "reason", "hint"),
    [
        ("__import__('os')", 1, "no function is called '__import__'", "known: exp"),
        ("score - __import__('os').getpid()", 9, "no attributes", ""),
        ("score.real", 1, "no attributes", ""),
        ("score - scoer", 9, "nothing is called 'scoer'", "did you mean score?"),
        ("score - window", 9, "nothing is called 'window'", "did you mean WINDOW?"),
        ("slop[head]", 1, "no parameter is called 'slop'", "did you mean slope?"),
        ("sqrd(score)", 1, "no function", "did you mean sqrt?"),
        ("slope", 1, "is a parameter", "write slope[head]"),
        ("exp", 1, "is a function", "write exp(...)"),
        ("score(1)", 1, "score is not a function", ""),
        ("score[head]", 1, "only parameters can be indexed", ""),
        ("slope[kv_head]", 7, "dim 'head' of slope is indexed by head", "write slope[head]"),
        ("slope[head + 1]", 7, "dim 'head'", "write slope[head]"),
        ("slope[head, batch]", 1, "takes 1 index, not 2", "write slope[head]"),
        ("shown[kv_pos, q_row]", 7, "dim 'q' of shown is indexed by q_row", "write shown[q_row, kv_pos]"),
        ("doc[batch, head]", 12, "indexed by kv_pos or q_pos", ""),
        ("slope[0:1]", 7, "indexed by head", ""),
        ("lambda: 1", 1, "lambda", ""),
        ("[score for score in 1]", 1, "comprehension", ""),
        ("f'{score}'", 1, "f-string", ""),
        ("(x := 1)", 2, "':='", ""),
        ("1 + 'a'", 5, "a string", ""),
        ("score ** 2", 1, "'**'", "x * x"),
        ("score if True else 1", 1, "if c else", "where(c, a, b)"),
        ("score @ 2", 1, "'@'", ""),
        ("1j", 1, "complex", ""),
        ("None", 1, "None", ""),
        ("...", 1, "Ellipsis", ""),
        ("kv_pos in 3", 1, "'in'", "compare with"),
        ("kv_pos is q_pos", 1, "'is'", "compare with"),
        ("~kv_pos", 1, "'~' takes bool", ""),
        ("score // 2", 1, "// takes int, not float and int", ""),
        ("(kv_pos < 2) + 1", 1, "+ takes numbers", "where(condition, 1, 0)"),
        ("where(1, 2, 3)", 1, "the condition of where takes bool, not int", ""),
        ("where(True, 2, False)", 1, "two numbers or two bools", ""),
        ("kv_pos and True", 1, "and takes bool", ""),
        ("exp(1, 2)", 1, "exp takes 1 argument, not 2", ""),
        ("min(1)", 1, "takes 2 or more arguments, not 1", ""),
        ("exp(x=1)", 5, "no keywords", ""),
        ("exp(*score)", 5, "'*'", ""),
        ("kv_pos // 0", 11, "division by zero", ""),
        ("score / 0.0", 9, "division by zero", ""),
        ("kv_pos % -3", 10, "negative", "1 or more"),
        ("9" * 20, 1, "64 bits", ""),
        ("9" * 1999, 1, "", ""),
        ("1e39", 1, "32-bit float", ""),
        ("1e999", 1, "32-bit float", ""),
        ("", 1, "empty", ""),
        (" \n", 1, "empty", ""),
        ("score\0", 6, "character", ""),
        ("sc\N{CYRILLIC SMALL LETTER O}re", 3, "character", ""),
        ("1 # two", 3, "character", ""),
        ("score; 1", 6, "invalid syntax", ""),
        ("  score +", 10, "invalid syntax", ""),
        ("1) + (2", 2, "unmatched", ""),
        ("import os", 1, "invalid syntax", ""),
        ("(" * 500 + "1" + ")" * 500, 201, "nested", ""),
        ("-" * 1500 + "1", 42, "nested deeper", ""),
        ("+".join(["1"] * 900), 1, "nested deeper", ""),
        (" or ".join(["True"] * 200), 1, "in a row", ""),
        ("1" + " " * 3000, 2001, "longer than 2000", ""),
    ],
)  # fmt: skip
def test_all_else_is_refused_by_its_column(text: str, column: int, reason: str, hint: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        read(text)
    error = caught.value
    assert error.column == column, str(error)
    assert reason in error.reason
    assert hint in error.hint
    assert str(error).startswith(f"column {column}: ")


def test_nested_chains_do_not_explode() -> None:
    """Each chain writes its middle twice: without a bound, eighteen of them are 2 ** 18 nodes."""
    text = "1"
    for _ in range(18):
        text = f"int(0<{text}<2)"
    started = time.process_time()
    with pytest.raises(ExpressionError, match="parts"):
        read(text)
    assert time.process_time() - started < 5


WORDS = ["and", "or", "not", "lambda", "0.5", "if", "else", "//", "**", *"()[]{},:+-*/%<=>~&|^.'12"]


@given(st.text(max_size=60) | st.lists(st.sampled_from([*NAMES, *PARAMS, *FUNCTIONS, *WORDS])).map(" ".join))
def test_any_text_is_a_node_or_an_error(text: str) -> None:
    try:
        kind, column = read(text).type, 1
    except ExpressionError as error:
        kind, column = "bool", error.column
    assert kind in ("bool", "int", "float")
    assert 1 <= column <= len(text) + 1


def test_the_whole_has_the_type_that_is_wanted() -> None:
    assert parse("q_pos", NAMES, PARAMS, want="float") == Op("float", (Q,))
    with pytest.raises(ExpressionError, match="must be a bool, and is a int"):
        parse("q_pos", NAMES, PARAMS, want="bool")


@pytest.mark.parametrize("name", ["head", "exp"])
def test_a_parameter_hides_nothing(name: str) -> None:
    with pytest.raises(ExpressionError, match="rename it"):
        parse("score", NAMES, {name: Param(name, ("head",), "f32")})


def test_types_are_checked_by_the_nodes_themselves() -> None:
    with pytest.raises(TypeError, match="no operation is called"):
        Op("pow", (KV, Q))
    with pytest.raises(TypeError, match="takes 2 arguments, not 1"):
        Op("<", (KV,))
