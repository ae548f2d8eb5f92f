"""Hints help: the names that people bring lead to ours, and what a hint names is accepted in its place."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from kvgen import names
from kvgen.errors import ABSENT, Diagnostic, SpecError, UnsupportedError
from kvgen.ir.attention import PARAM_DIMS
from kvgen.ir.codec import CODECS
from kvgen.ir.layout import DIMS, LayoutSpec
from kvgen.ir.quant import SCALE_DTYPES
from kvgen.passes.fields import CACHE, PARAM, ROPE, TOP, quant_fields
from kvgen.passes.parse import FUNCTIONS
from kvgen.passes.terms import POSITIONS
from kvgen.passes.validate import load_spec
from kvgen.support_specs import refused_specs
from kvgen.targets import ALIASES, TARGETS, known_target
from kvgen.variants import attention_fields
from tests.passes.test_check_quant import MISTAKES as QUANT_MISTAKES
from tests.passes.test_validate import GOOD, MISTAKES, edited, mistakes

BROUGHT: list[tuple[str, Any, str]] = [
    ("cache.k.format", "fp8", "did you mean 'e4m3'?"),
    ("cache.k.format", "FP8_E4M3", "did you mean 'e4m3'?"),
    ("cache.k.format", "torch.float8_e4m3fn", "did you mean 'e4m3'?"),
    ("cache.k.format", "fp8_e5m2", "did you mean 'e5m2'?"),
    ("cache.v.format", "float16", "did you mean 'f16'?"),
    ("cache.v.format", "bfloat16", "did you mean 'bf16'?"),
    ("cache.k.format", "q8_0", "did you mean 'int8'?"),
    ("cache.k.format", "int8 ", "did you mean 'int8'?"),
    ("cache.k.format", "INT4", "did you mean 'int4'?"),
    ("cache.k.scale_dtype", "float16", "did you mean 'f16'?"),
    ("cache.k.scale_dtype", "ue8m0", "did you mean 'e8m0'?"),
    ("attention.q_dtype", "torch.bfloat16", "did you mean 'bf16'?"),
    ("attention.q_dtype", "float", "did you mean 'f32'?"),
    ("cache.k", {"dtype": "int8"}, "did you mean 'format'?"),
    ("cache.k", {"dtype": "fp8"}, "did you mean format = 'e4m3'?"),
    ("attention.dtype", "bf16", "did you mean 'q_dtype'?"),
    ("attention.num_kv_heads", 2, "did you mean 'kv_heads'?"),
    ("attention.num_attention_heads", 8, "did you mean 'q_heads'?"),
    ("attention.head_size", 64, "did you mean 'head_dim'?"),
    ("attention.sliding_window", 64, "did you mean 'window'?"),
    ("attention.softmax_scale", 0.1, "did you mean 'scale'?"),
    ("attention.logits_soft_cap", 30.0, "did you mean 'soft_cap'?"),
    ("cache.block_size", 16, "did you mean 'page_size'?"),
    ("cache.format", "int8", "it belongs into [cache.k] and [cache.v]"),
    ("cache.k.page_size", 16, "it belongs into [cache]"),
    ("attention.page_size", 16, "it belongs into [cache]"),
    ("q_heads", 8, "it belongs into [attention]"),
    ("attention.theta", 1e4, "it belongs into [attention.rope]"),
    ("cache.kv_layout", "page kv head tok d", "did you mean 'layout'?"),
    ("cache.k.group_size", {"tok": 1, "head": 1}, "did you mean 'group'?"),
    ("cache.k.group.tokens", 1, "did you mean 'tok'?"),
    ("cache.layout", "NHD", "did you mean 'page kv tok head d'?"),
    ("cache.layout", "hnd", "did you mean 'page kv head tok d'?"),
    ("cache.layout", "page, kv, head, tok, d", "did you mean 'page kv head tok d'?"),
    ("cache.layout", "Page KV Tok Head D", "did you mean 'page kv tok head d'?"),
    (
        "cache.layout",
        "[2, num_blocks, block_size, kv_heads, head_dim]",
        "did you mean 'kv page tok head d'?",
    ),
    (
        "cache.layout",
        ["2", "num_blocks", "block_size", "kv_heads", "head_dim"],
        "did you mean 'kv page tok head d'?",
    ),
    ("cache.layout", "(max_num_pages, 2, num_kv_heads, page_size, head_dim)", "'page kv head tok d'?"),
    ("cache.k.layout", "num_kv_heads, head_size/x, block_size, x", "did you mean 'head d/8 tok d%8'?"),
    ("cache.k.layout", "NHD", "did you mean 'tok head d'?"),
    ("attention.mask", "kv_idx <= q_idx", "did you mean kv_pos?"),
    ("attention.mask", "kv_pos <= q_idx", "did you mean q_pos?"),
    ("attention.score", "score + maximum(b, 1.0)", "did you mean max?"),
    ("attention.score", "score * b", "did you mean batch?"),
    (
        "attention.head_dim",
        100,
        "96 and 104 work: pad q, k and v with zeros to 104 elements and set scale = 0.1",
    ),
    ("attention.causal", "yes", "not a boolean; true or false"),
    ("attention.head_dim", 64.0, "64 works"),
    ("cache.page_size", "16", "16 works"),
    ("cache.align", 48, "32 and 64 work"),
    ("cache.k.group", {"head": 1, "tok": 3}, "1, 2, 4, 8 and 16 work"),
    ("cache.k.group", {"head": 1, "tok": 1, "d": 48}, "16 and 32 work"),
    ("attention.q_heads", 7, "6 works"),
    ("attention.params", {"class": {"dims": ["head"]}}, "call it class_param"),
    ("attention.params", {"exp": {"dims": ["head"]}}, "call it exp_param"),
    ("attention.params", {"kv_pos": {"dims": ["kv"]}}, "call it kv_pos_param"),
    ("cache.layout", "page head d tok kv", "move kv left of every d axis: 'page head kv d tok'"),
    (
        "cache.k",
        {"format": "table"},
        "cache.k.levels: missing: format = 'table' has ascending levels of your own",
    ),
    ("cache.k", {"format": "int2", "group": {"head": 1, "tok": 1, "d": 48}}, "16 and 32 work"),
    ("attention.rope", {"kind": "llama"}, "did you mean 'llama3'?"),
    ("attention.rope", {"rope_theta": 5e5}, "did you mean 'theta'?"),
]
"""Path, value, and the hint that it gets."""


@pytest.mark.parametrize(("path", "value", "hint"), BROUGHT, ids=[f"{p} {v}"[:60] for p, v, _ in BROUGHT])
def test_what_people_bring_leads_to_our_names(path: str, value: Any, hint: str) -> None:
    (found,) = mistakes(edited(path, value))
    assert hint in str(found), str(found)


def test_a_relative_bias_is_led_to_a_tensor() -> None:
    raw = edited("attention.score", "score + rel[head, q_pos - kv_pos]")
    raw["attention"]["params"] = {"rel": {"dims": ["head", "kv"]}}
    (found,) = mistakes(raw)
    assert "by nothing that is calculated" in found.reason
    assert found.hint == 'give it dims ["head", "q", "kv"] and write rel[head, q_row, kv_pos]'
    raw["attention"] |= {
        "score": "score + rel[head, q_row, kv_pos]",
        "params": {"rel": {"dims": ["head", "q", "kv"]}},
    }
    assert load_spec(raw)


def test_the_choices_are_told_once_and_after_the_suggestion() -> None:
    raw = edited("cache.k.format", "fp8")
    raw["cache"]["v"]["format"] = "float16"
    text = "\n".join(map(str, mistakes(raw)))
    assert text.count("lloyd3") == 1 and text.index("did you mean 'e4m3'") < text.index("lloyd3")
    raw["cache"]["k"]["format"] = raw["cache"]["v"]["format"] = "zzz"
    text = "\n".join(map(str, mistakes(raw)))
    assert text.count("lloyd3") == 1 and "see the choices of cache.k.format" in text


def table_of(raw: dict[str, Any], path: str) -> tuple[Any, str]:
    """The table that holds the last key of a path, and that key."""
    *tables, key = path.replace("[", ".").replace("]", "").split(".")
    table: Any = raw
    for name in tables:
        table = table[int(name) if isinstance(table, list) else name]
    return table, key


def applied(raw: dict[str, Any], found: Diagnostic, value: Any) -> dict[str, Any]:
    """``raw`` with a hint's value (``ABSENT``: nothing) in the place of what was found, under its name."""
    raw = copy.deepcopy(raw)
    table, key = table_of(raw, found.path)
    table.pop(key, None)
    if value is not ABSENT:
        table[found.rename or key] = value
    return raw


def named(found: Diagnostic) -> list[Any]:
    """What the hint says that would work: values, a name for the key, or the key left out."""
    if found.works or found.rename:
        return [*found.works] or [found.value]
    if re.search(r"leave (it|\w+) out", found.hint):
        return [ABSENT]
    if found.hint.startswith("'"):
        return re.findall(r"'(\w+)'", found.hint.partition(", or ")[0])
    if found.hint.startswith(("true or", "true (")):
        return [True, False]
    if name := re.fullmatch(r"did you mean (\w+)\?", found.hint):
        at = re.match(r"column (\d+): .* '(\w+)'$", found.reason)
        assert at, found
        start, text = int(at[1]) - 1, str(found.value)
        return [text[:start] + name[1] + text[start + len(at[2]) :]]
    return []


def cases() -> list[dict[str, Any]]:
    """Specs that are wrong."""
    wide = {"page_size": 32, "v": {"format": "bf16"}}
    heads = {"q_heads": 8, "kv_heads": 2, "head_dim": 64}
    return [
        *(edited(path, value) for path, value, _ in (*MISTAKES, *BROUGHT)),
        *({"attention": heads, "cache": wide | {"k": k}} for k, _, _ in QUANT_MISTAKES),
        *(raw for _, raw in refused_specs()),
    ]


@pytest.mark.parametrize("raw", cases(), ids=[str(at) for at in range(len(cases()))])
def test_what_a_hint_names_gets_rid_of_the_mistake(raw: dict[str, Any]) -> None:
    for found in mistakes(raw):
        for works in named(found):
            try:
                load_spec(applied(raw, found, works))
            except SpecError as error:
                left = [d for d in error.diagnostics if d.path == found.path and d.reason == found.reason]
                assert not left, (str(found), works)


def test_hints_that_name_values_are_many() -> None:
    """The test above has something to try."""
    found = [d for raw in cases() for d in mistakes(raw)]
    assert sum(bool(d.works) for d in found) > 60 and sum(bool(d.rename) for d in found) > 15
    assert sum(bool(named(d)) for d in found) > 130


def test_the_table_leads_to_names_that_exist() -> None:
    keys = {*TOP, *attention_fields(), *CACHE, *quant_fields(), *ROPE, *PARAM, "tok", "head", "d"}
    assert set(names.FORMATS.values()) <= {*CODECS, *SCALE_DTYPES}
    assert set(names.KEYS.values()) | set(names.MORE_KEYS.values()) <= keys
    assert set(names.AXES.values()) <= set(DIMS)
    assert all(LayoutSpec.parse(text) for text in names.LAYOUTS.values())
    assert set(names.INDICES.values()) <= {*POSITIONS, "score"} and PARAM_DIMS
    assert set(names.FUNCTIONS.values()) <= set(FUNCTIONS)
    assert set(names.TARGETS.values()) <= {*TARGETS, *ALIASES}
    own = {*CODECS, *SCALE_DTYPES}
    assert not own & {name for name, meant in names.FORMATS.items() if name != meant}


@pytest.mark.parametrize(
    ("name", "meant"),
    [("H100", "sm_90"), ("avx2", "cpu-avx2"), ("SM_90", "sm_90"), ("sm90", "sm_90"), ("gpu", "cuda")],
)
def test_machines(name: str, meant: str) -> None:
    with pytest.raises(UnsupportedError, match=f"did you mean '{meant}'"):
        known_target(name)


def test_blocks_of_packed_parts_are_explained_by_a_rule_that_the_hint_keeps() -> None:
    raw = edited("attention.head_dim", 96)
    raw["cache"]["k"] = {"format": "int2", "group": {"tok": 1, "head": 1, "d": 8}}
    (found,) = mistakes(raw)
    assert found.works == (48,) and "packed parts of 24 hold whole, or that holds them whole" in found.reason
    assert load_spec(applied(raw, found, 48))


def test_a_good_spec_is_good() -> None:
    assert load_spec(GOOD)
