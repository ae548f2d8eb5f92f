"""validate: every mistake at once, each with path, value, reason and what works; never another exception."""

from __future__ import annotations

import copy
import datetime
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.errors import ABSENT, Diagnostic, SpecError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec, validate
from tests.support.specs import raw_specs

GOOD: dict[str, Any] = {
    "attention": {"q_heads": 8, "kv_heads": 2, "head_dim": 64},
    "cache": {"page_size": 16, "k": {"format": "int8"}, "v": {"format": "bf16"}},
}
HUGE = 10**5000


def short(value: object) -> str | None:
    """An id for pytest, which cannot print everything either."""
    if isinstance(value, int) and abs(value) > 2**64:
        return "huge"
    if isinstance(value, dict) and HUGE in value.values():
        return "huge block"
    return (
        type(value).__name__
        if type(value) is object
        else "long"
        if isinstance(value, str) and len(value) > 80
        else None
    )


def edited(path: str, value: object) -> dict[str, Any]:
    raw = copy.deepcopy(GOOD)
    *tables, key = path.split(".")
    table = raw
    for name in tables:
        table = table.setdefault(name, {})
    table[key] = value
    return raw


def mistakes(raw: object) -> list[Diagnostic]:
    with pytest.raises(SpecError) as caught:
        load_spec(raw)  # type: ignore[arg-type]
    assert caught.value.diagnostics
    assert all(str(d) in str(caught.value) for d in caught.value.diagnostics)
    return list(caught.value.diagnostics)


MISTAKES: list[tuple[str, Any, str]] = [
    ("name", 7, "not a string"),
    ("name", "a */ b", "not a short line"),
    ("name", "two\nlines", "not a short line"),
    ("name", "ends with \\", "not a short line"),
    ("nmae", "x", "unknown key"),
    ("attention", None, "not a table"),
    ("attention", [1], "not a table"),
    ("attention.q_heads", True, "not an integer"),
    ("attention.q_heads", 8.0, "not an integer"),
    ("attention.q_heads", 7, "not a multiple of kv_heads = 2"),
    ("attention.q_heads", 2 * 129, "a group of 129"),
    ("attention.q_heads", HUGE, "outside 1 to 65536"),
    ("attention.q_heads", 0, "outside"),
    ("attention.kv_heads", -1, "outside"),
    ("attention.head_dim", 20, "not a multiple of 8"),
    ("attention.head_dim", 8, "outside 16 to 576"),
    ("attention.v_head_dim", 584, "outside 16 to 576"),
    ("attention.q_dtype", ["bf16"], "not one of the choices"),
    ("attention.q_dtype", "fp16", "not one of the choices"),
    ("attention.scale", float("nan"), "not a positive finite"),
    ("attention.scale", float("inf"), "not a positive finite"),
    ("attention.scale", 0, "not a positive finite"),
    ("attention.scale", HUGE, "not a positive finite"),
    ("attention.scale", 1e-300, "not a positive finite"),
    ("attention.scale", True, "not a number"),
    ("attention.causal", 1, "not a boolean"),
    ("attention.window", -1, "outside"),
    ("attention.qk", "int4", "not one of the choices"),
    ("attention.pv", "int8", "has no integer codes to multiply"),
    ("cache.page_size", 0, "outside"),
    ("cache.page_size", "16", "not an integer"),
    ("cache.align", 48, "not a power of two"),
    ("cache.align", 8192, "outside"),
    ("cache.align", False, "not an integer"),
    ("cache.layout", 5, "not a string"),
    ("cache.layout", "", "empty layout"),
    ("cache.layout", "page kv head tok", "has no axis for d"),
    ("cache.layout", "page kv head tok ḋ", "is not an axis"),
    ("cache.layout", "page head d kv tok", "kv stands inside d"),
    ("cache.layout", "kv head d page tok", "page stands right of a d axis"),
    ("cache.layout", "kv head d/8 page tok d%8", "page stands right of a d axis"),
    ("cache.layout", "page kv head tok/3 tok%3 d", "does not divide page_size = 16"),
    ("cache.layout", "page kv head d/24 tok d%24", "does not divide head_dim = 64"),
    ("cache.layout", f"page kv head d/{'9' * 5000} tok d%{'9' * 5000}", "too long"),
    ("cache.k.format", "int5", "not one of the choices"),
    ("cache.k.group", {"d": 32}, "no int8 kernel scales by this block"),
    ("cache.k.group", {"tok": 16, "head": 2}, "no int8 kernel"),
    ("cache.k.group", {"tok": 1.0, "head": 1}, "no int8 kernel"),
    ("cache.k.group", {"tok": True, "head": 1}, "no int8 kernel"),
    ("cache.k.group", {1: 1, "head": 1}, "no int8 kernel"),
    ("cache.k.group", "head", "not a table"),
    ("cache.v.group", {}, "stores values, not scaled codes"),
    ("cache.k.scale_dtype", "f64", "not one of the choices"),
    ("cache.k.layout", "head tok", "must name exactly the dimensions right of kv"),
    ("cache.k.layout", "page head tok d", "must name exactly the dimensions right of kv"),
    ("cache.v.layout", "head d/48 tok d%48", "does not divide head_dim = 64"),
    ("cache.k", {"format": "int8", "fmt": 1}, "unknown key"),
    *((f"cache.k.group.{key}", 1, "unknown key") for key in ("tokk", "page", "")),
    *(
        ("cache.k.group", {"head": 1, "tok": block}, "no int8 kernel scales by this block")
        for block in (0, -1, "1", None, [1], {"tok": 1})
    ),
    ("cache.k.group", {"tok": 1}, "no int8 kernel scales by this block"),
    *(
        (
            "cache.k.group",
            {"tok": 1, "head": 1, "d": block},
            "not a multiple of 16 below head_dim = 64 that divides it",
        )
        for block in (0, 1, 8, 48, 64, -16, HUGE, "32", None, 32.0)
    ),
    ("cache.k.group", [["tok", 1]], "not a table"),
    *((f"{table}.new", 1, "unknown key") for table in ("attention", "cache", "cache.k", "cache.v")),
    *(
        ("cache.layout", text, reason)
        for text, reason in {
            "page kv head tok d page": "names page again: two axes would overlap",
            "page kv kv head tok d": "names kv again",
            "page kv head tok tok/4 tok%4 d": "names tok again",
            "page kv head d/8 tok d%8 d/8": "names d again",
            "page kv head tok/4 tok%8 d": "splits tok by another block than tok/4",
            "page kv head tok/4 d": "half of a split; its other half tok%4 is missing",
            "page kv head tok%4 d": "half of a split; its other half tok/4 is missing",
            "page kv head tok%4 tok/4 d": "write the outer half first",
            "page/2 page%2 kv head tok d": "splits page; only tok and d can be split",
            "page kv head/2 head%2 tok d": "splits head; only tok and d can be split",
            "page kv head tok d/0 d%0": "block below 2",
            "page kv head tok d/-8 d%-8": "is not an axis",
            "page, kv, head, tok, d": "is not an axis",
            "kv tok d": "has no axis for page and head",
            "page head tok": "has no axis for d",
            "page tok d": "has no axis for head",
        }.items()
    ),
    ("cache.k.layout", "head d/8 tok d%8 tok", "names tok again"),
    ("cache.k.layout", "head tok d page", "must name exactly"),
    *(
        (path, value, reason)
        for path, reason in {
            "attention.q_heads": "not an integer",
            "attention.window": "not an integer",
            "attention.head_dim": "not an integer",
            "cache.page_size": "not an integer",
            "cache.align": "not an integer",
            "attention.scale": "not a number",
            "attention.causal": "not a boolean",
            "attention.q_dtype": "not one of the choices",
            "cache.k.format": "not one of the choices",
            "cache.layout": "not a string",
            "cache.v.layout": "not a string",
            "cache.k.group": "not a table",
            "cache.v": "not a table",
            "name": "not a string",
        }.items()
        for value in ([], [1], object(), *([] if reason == "not a table" else [{}, {"a": {"b": 1}}]))
    ),
    *(("attention.kv_heads", value, "not an integer") for value in (True, 2.0, "2", b"2", None)),
    *(("cache.page_size", value, "outside") for value in (-16, -HUGE, HUGE, 4097)),
]
"""Path, value, and a part of the reason."""


@pytest.mark.parametrize("path, value, reason", MISTAKES, ids=short)
def test_one_mistake(path: str, value: object, reason: str) -> None:
    found = mistakes(edited(path, value))
    hits = [d for d in found if path in d.path and reason in d.reason]
    assert len(hits) == 1, found
    assert len(found) == 1 or path == "attention", found


def test_all_mistakes_at_once() -> None:
    raw = {
        "attention": {"q_heads": 7, "kv_heads": 2, "head_dim": 20, "widnow": 4, "scale": -1},
        "cache": {"page_size": True, "layout": "page kv head tok", "align": 3, "k": {"format": "int7"}},
        5: None,
    }
    expected = {
        *("attention.q_heads", "attention.head_dim", "attention.widnow", "attention.scale"),
        *(
            "cache.page_size",
            "cache.layout",
            "cache.align",
            "cache.k.format",
            "cache.v",
            "5",
            "cache.v.format",
        ),
    }
    found = mistakes(raw)
    assert {d.path for d in found} | {"cache.v.format"} == expected
    assert len(found) == len({d.path for d in found})
    assert next(d for d in found if d.path == "attention.widnow").hint == "did you mean 'window'?"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("atention", "attention"),
        ("attention.q_haeds", "q_heads"),
        ("attention.vhead_dim", "v_head_dim"),
        ("cache.paeg_size", "page_size"),
        ("cache.layuot", "layout"),
        ("cache.k.gruop", "group"),
        ("cache.v.formt", "format"),
        ("cache.k.group.heads", "head"),
    ],
)
def test_the_nearest_key_is_told(path: str, hint: str) -> None:
    (found,) = mistakes(edited(path, 1))
    assert (found.path, found.hint) == (path, f"did you mean {hint!r}?")


def test_values_of_any_type_are_shown_without_their_own_repr() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    (found,) = mistakes(edited("cache.k.group." + "h" * 10_000, 1))
    assert len(str(found)) < 700
    for value in (Hostile(), [Hostile()], {Hostile(): Hostile()}, {"k" * 10**6: 1}, "v" * 10**6):
        (found,) = mistakes(edited("cache.page_size", value))
        assert len(str(found)) < 700


def test_a_flood_of_keys_is_one_mistake_more() -> None:
    raw = copy.deepcopy(GOOD)
    raw["cache"] |= {f"key{number}": number for number in range(200_000)}
    found = mistakes(raw)
    assert len(found) == 51
    assert any(d.path == "cache" and d.value == "(200003 keys)" for d in found)


def test_a_shared_split_is_reported_once_and_names_the_field_that_was_written() -> None:
    found = mistakes(edited("cache.layout", "page kv head d/24 tok d%24"))
    assert [d.hint for d in found] == ["d/16 ... d%16 works"]


@pytest.mark.parametrize(
    "layout", ["kv head tok d", "page kv tok", "head d", "tok", "kv", "tok/4 kv d/8 d%8 tok%4"]
)
def test_the_completed_layout_of_the_hint_works(layout: str) -> None:
    (found,) = mistakes(edited("cache.layout", layout))
    completed = found.hint.removeprefix("write ").strip("'")
    assert isinstance(load_spec(edited("cache.layout", completed)), Spec)


def test_the_page_hint_works() -> None:
    (found,) = mistakes(edited("cache.layout", "kv head d/8 page tok d%8"))
    fixed = found.hint.split(": ")[1].strip("'")
    assert isinstance(load_spec(edited("cache.layout", fixed)), Spec)


def test_overrides_of_two_pools_name_page_and_keep_it_left_of_d() -> None:
    raw = edited("cache.layout", "page tok head d")
    raw["cache"]["k"]["layout"] = "head d page tok"
    raw["cache"]["v"]["layout"] = "head tok d"
    assert {d.path: d.reason[:20] for d in mistakes(raw)} == {
        "cache.k.layout": "page stands right of",
        "cache.v.layout": "must name exactly th",
    }


@pytest.mark.parametrize(
    "raw",
    [None, 5, [], [("attention", {})], {"attention": None, "cache": None}, {HUGE: HUGE}, {("a", 1): 2}, {}],
)
def test_hostile_top_levels(raw: object) -> None:
    with pytest.raises(SpecError) as caught:
        validate(raw)
    assert str(caught.value)


def test_endless_nesting_is_a_mistake_like_any_other() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    (found,) = mistakes(edited("cache.page_size", deep))
    assert found.value == "(list too large to show)"


_leaf = st.sampled_from([None, True, 0, -1, 16, 2**70, 1.5, float("nan"), "", "int8", "page d", "ß/8", b"x"])
_key = st.sampled_from(
    ["attention", "cache", "k", "v", "format", "group", "layout", "tok", 3, None, ("x",), "\ud800"]
)
_junk = st.recursive(
    _leaf | st.just(datetime.date(2020, 1, 1)) | st.just(5000).map(lambda digits: 10**digits),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_key, inner, max_size=4),
    max_leaves=8,
)


@given(st.data(), raw_specs(), _junk)
def test_junk_anywhere_is_a_spec_error_or_a_spec(
    data: st.DataObject, raw: dict[str, Any], junk: object
) -> None:
    table: Any = raw
    while isinstance(table, dict):
        key = data.draw(st.sampled_from([*table, "junk", 5]))
        if not isinstance(table.get(key), dict) or data.draw(st.booleans()):
            break
        table = table[key]
    table[key] = junk
    try:
        spec = load_spec(raw)
    except SpecError as error:
        shown = len(error.diagnostics) * (str(error).count("\n") >= len(error.diagnostics))
    else:
        shown = load_spec(spec.to_dict()) == spec
    assert shown


def test_toml_files(tmp_path: Path) -> None:
    text = (
        "[attention]\nq_heads = 8\nkv_heads = 2\nhead_dim = 64\n"
        "[cache]\npage_size = 16\nk = { format = 'int8' }\nv = { format = 'bf16' }\n"
    )
    path = tmp_path / "it's mine.toml"
    path.write_text(text)
    assert load_spec(path) == load_spec(str(path))
    assert load_spec(path).name == "it_s_mine"
    assert load_spec(path).hash == load_spec(GOOD).hash
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    (tmp_path / "half.toml").write_text("[attention\n")
    (tmp_path / "endless.toml").write_text(f"name = {'9' * 5000}\n")
    (tmp_path / "deep.toml").write_text(f"name = {'[' * 20_000}\n")
    (tmp_path / "dots.toml").write_text(f"{'a.' * 10_000}a = 1\n")
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "large.toml").write_text("# nothing\n" * 10_000)
    (tmp_path / "twice.toml").write_text(text + "page_size = 8\n")
    (tmp_path / "zeros.toml").write_bytes(bytes(100))
    (tmp_path / "table.toml").write_text(text + "[attention]\n")
    (tmp_path / "deeper.toml").write_text(text + "k = { format = 'int8' }\n")
    (tmp_path / "spec.json").write_text('{"attention": {"q_heads": 8}}')
    (tmp_path / "spec.yaml").write_text("# heads\nattention:\n  q_heads: 8\n")
    (tmp_path / "marked.toml").write_text(text, encoding="utf-8-sig")
    assert load_spec(tmp_path / "marked.toml").hash == load_spec(GOOD).hash
    for name, reason in {
        "latin.toml": "is not UTF-8: byte 8",
        "half.toml": "is not TOML",
        "endless.toml": "is not TOML",
        "deep.toml": "is no spec: more than 64 brackets around a value",
        "dots.toml": "is no spec: line 1: a name of more than 8 parts",
        "large.toml": "100,000 bytes, and at most 65,536 are read",
        "pipe.toml": "no regular file but a pipe",
        "twice.toml": "page_size stands there twice, the second time in line 9",
        "zeros.toml": "is not TOML",
        "table.toml": "[attention] stands there twice, the second time in line 9",
        "deeper.toml": "k stands there twice, the second time in line 9",
        "spec.json": "is JSON, not TOML",
        "spec.yaml": "is YAML, not TOML",
        "absent.toml": "no such file",
        "x" * 5000: "cannot be read",
        "": "is a folder",
        "half.toml/x": "cannot be read",
        "nul\0.toml": "is no path",
    }.items():
        found = mistakes(str(tmp_path / name))
        assert found[0].reason.startswith(reason) and len(found) == 1, name
        assert len(str(found[0])) < 1000
        assert found[0].value is ABSENT


def test_three_thousand_parameters_are_one_mistake() -> None:
    raw = copy.deepcopy(GOOD)
    raw["attention"]["params"] = {f"p{number}": {"dims": ["head"]} for number in range(3000)}
    (found,) = mistakes(raw)
    assert str(found).startswith("attention.params = '(3000 parameters)': a kernel takes at most 64;")


def test_a_message_holds_sixty_mistakes_and_the_error_all() -> None:
    error = SpecError([Diagnostic(f"k{number}", 1, "unknown key") for number in range(3000)])
    lines = str(error).splitlines()
    assert len(lines) == 62 and lines[0] == "3000 mistakes in the spec:" and len(error.diagnostics) == 3000
    assert lines[-1] == "  and 2940 more mistakes"


def test_a_file_that_is_no_spec_is_no_mistake_in_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "absent.toml")
    assert str(caught.value) == f"{tmp_path}/absent.toml: no such file; give the path of a TOML spec"
    again = copy.deepcopy(caught.value)
    assert str(again) == str(caught.value) and again.diagnostics == caught.value.diagnostics


def test_what_is_missing_has_no_value() -> None:
    with pytest.raises(SpecError, match=r"cache\.page_size: missing; for example 16"):
        load_spec({**GOOD, "cache": {"k": {"format": "int8"}, "v": {"format": "bf16"}}})
