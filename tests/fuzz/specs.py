"""The specs that a fuzzer runs, and how it spoils a spec."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import cycle
from random import Random
from typing import Any

from kvgen.backends.cpu import isa
from kvgen.errors import UnsupportedError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.fuzz import spoil
from tests.runtime.test_arguments import SPEC
from tests.support.specs import covering, covering_specs, make_spec
from tests.support.variants import MASKS, ROPES, SCORES, variant_spec

FIRST: list[tuple[str, Spec]] = [
    ("portable", SPEC),
    ("portable", make_spec("int8-token", "int8-token", page_size=8, kv_heads=2, group=2, head_dim=32)),
    ("portable", make_spec("int8-head", "f32", page_size=8, kv_heads=2, group=2, head_dim=32)),
]
"""Those that other tests compile too."""

TERMS: list[tuple[str, Spec]] = [
    (
        "portable",
        load_spec(
            {
                "attention": {
                    "q_heads": 4, "kv_heads": 2, "head_dim": 32, "q_dtype": "f32", "bool_mask": "bits",
                    "kv_first": True, "document": True, "soft_cap": 20.0, "alibi": True, "sink_logit": True,
                    "rope": {"kind": "linear", "factor": 2.0},
                },
                "cache": {"page_size": 4, "k": {"format": "bf16"}, "v": {"format": "int8"}},
            }
        ),
    ),
    (
        "portable",
        load_spec(
            {
                "attention": {
                    "q_heads": 3, "kv_heads": 1, "head_dim": 48, "v_head_dim": 32, "q_dtype": "f32",
                    "causal": False, "tree": True, "prefix_lm": True, "chunk": 5,
                    "score": "score * bias[q_row, kv_pos] - slope[head] * abs(q_pos - kv_pos)",
                    "mask": "kv_pos < far[batch] or kv_pos % 2 == 0",
                    "params": {
                        "bias": {"dims": ["q", "kv"]}, "slope": {"dims": ["head"]},
                        "far": {"dims": ["batch"], "dtype": "i64"},
                    },
                    "rope": {"stored": "pre", "pairing": "interleaved", "dim": 16},
                },
                "cache": {
                    "page_size": 4, "layout": "page head tok d", "k": {"format": "int8"}, "v": {"alias": "k"}
                },
            }
        ),
    ),
]  # fmt: skip
"""All kinds of parameters, K turned at append and when it is read, V inside K."""

UNEVEN = load_spec(
    {
        "attention": {"q_heads": 6, "kv_heads": 2, "head_dim": 40, "v_head_dim": 24, "window": 5},
        "cache": {
            "page_size": 5,
            "layout": "page tok kv head d",
            "k": {"format": "int8"},
            "v": {"format": "bf16"},
        },
    }
)


def rows() -> Iterable[str]:
    """Rows of the CPU backend that run here."""
    found = []
    for row in ("portable", "avx2", "avx512-bf16", "avx512"):
        try:
            name, _, feature = row.partition("-")
            isa.check_runnable([*isa.ROWS[name].required, *filter(None, [feature])], what=row)
        except UnsupportedError:
            continue
        found.append(row)
    return cycle(found)


def pool(count: int) -> list[tuple[str, Spec]]:
    """(row, spec) of the first so many: small shapes, every format, layout and mask."""
    small = {"page_size": (1, 4, 16), "kv_heads": (1, 2), "group": (1, 3, 8), "head_dim": (16, 32, 72)}
    terms = [variant_spec(mask, score, sink, rope, alias) for mask, score, sink, rope, alias in _terms()]
    plain = covering_specs(7, **small)
    mixed = [spec for pair in zip(plain, terms, strict=False) for spec in pair]
    more = [UNEVEN, *mixed, *plain[len(terms) :]]
    return [*FIRST, *TERMS, *zip(rows(), more, strict=False)][:count]


def _terms() -> Iterable[tuple[str, str, bool, str, bool]]:
    """Pairs of registered terms, each mask and each score at least once."""
    names = {
        "mask": MASKS,
        "score": SCORES,
        "sink": (False, True),
        "rope": tuple(ROPES),
        "alias": (False, True),
    }
    return [tuple(line.values()) for line in covering(names, 7)]  # type: ignore[misc]


RAW: dict[str, Any] = {
    "name": "fuzz",
    "attention": {
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "scale": 0.5,
        "window": 7,
        "causal": True,
        "soft_cap": 30.0,
        "alibi": {"heads": 8, "offset": 4},
        "chunk": 9,
        "sink_logit": True,
        "score": "score * slope[head] + exp2(-0.5 * (q_pos - kv_pos))",
        "mask": "kv_pos % 3 != 1 or seen[batch, kv_pos]",
        "params": {
            "slope": {"dims": ["head"], "dtype": "f32"},
            "seen": {"dims": ["batch", "kv"], "dtype": "bits"},
        },
        "rope": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "stored": "pre"},
    },
    "cache": {
        "page_size": 4,
        "layout": "page kv head tok d",
        "align": 64,
        "k": {"format": "int8", "group": {"tok": 1, "head": 1}, "layout": "head d/8 tok d%8"},
        "v": {"format": "bf16"},
    },
}
TEXT = """name = "fuzz"
[attention]
q_heads = 4
kv_heads = 2
head_dim = 16
window = 7
soft_cap = 30.0
score = "score - slope[head] * abs(q_pos - kv_pos)"
mask = "kv_pos <= q_pos and (kv_pos & 3 != 2 or not kv_pos < 9)"
[attention.params]
slope = { dims = ["head"] }
[attention.rope]
kind = "linear"
factor = 4.0
[cache]
page_size = 4
layout = "page kv head tok d"
[cache.k]
format = "int8"
group = { tok = 1, head = 1 }
[cache.v]
format = "bf16"
"""
TOKENS = (
    *("score", "q_pos", "kv_pos", "head", "kv_len", "slope", "slope[head]", "seen[batch, kv_pos]", "bogus"),
    *("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "<", "==", "!=", "and", "or", "not"),
    *("(", ")", "[", "]", ",", "if", "else", "lambda", "exp(", "where(", "min(", "tanh(", "int(", "float("),
    *("0", "1", "63", "64", "-1", "9" * 40, "1e999", "0.5", "True", "None", "'x'", "__import__", "~", "."),
)
"""What random expressions are made of."""
WORDS = ("page", "kv", "head", "tok", "d", "d/8", "d%8", "tok/2", "tok%2", "d/7", "x", "", "page/2", "kv%2")


def raw(rng: Random) -> tuple[str, Any]:
    """A mapping that is no spec, or an unusual one."""
    found = copy.deepcopy(RAW)
    labels = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        table, path = found, []
        while True:
            key = rng.choice([*table, "unknown", "q_haeds"])
            path.append(str(key))
            if not isinstance(table.get(key), dict) or rng.random() < 0.3:
                break
            table = table[key]
        how = rng.choice(["drop", "junk", "junk", "rename", "layout", "nest", "expression"])
        if how == "drop":
            table.pop(key, None)
        elif how == "rename":
            table[rng.choice([5, None, f"{key!r}s", ("a",), b"k", "\ud800", "k" * 9999])] = table.pop(key, 1)
        elif how == "layout":
            table[key] = " ".join(rng.choices(WORDS, k=rng.randrange(7)))
        elif how == "expression":
            where = rng.choice(["score", "mask"])
            found.setdefault("attention", {})
            if isinstance(found["attention"], dict):
                found["attention"][where] = expression(rng)
        elif how == "nest":
            table[key] = _nested(rng.choice([1, 3, 20_000]))
        else:
            table[key] = spoil.junk(rng)
        labels.append(f"{how} {'.'.join(path)}")
    return ", ".join(labels), found


def expression(rng: Random) -> str:
    """Random tokens, most of them no expression; sometimes a real one with one token changed."""
    if rng.random() < 0.5:
        words = ["score", "-", "slope", "[", "head", "]", "*", "abs(", "q_pos", "-", "kv_pos", ")", "/", "2"]
        words[rng.randrange(len(words))] = rng.choice(TOKENS)
        return " ".join(words)
    return " ".join(rng.choices(TOKENS, k=rng.choice([1, 3, 9, 200])))


def _nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found] if depth % 2 else {"a": found}
    return found


def text(rng: Random) -> tuple[str, bytes]:
    """A file that is no TOML, or TOML that is no spec."""
    data = bytearray(TEXT.encode())
    labels = []
    for _ in range(rng.choice([1, 2, 5])):
        how, at = rng.choice(["flip", "cut", "insert", "double"]), rng.randrange(len(data) + 1)
        if how == "flip":
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif how == "cut":
            del data[at : at + rng.choice([1, 5, 10_000])]
        elif how == "insert":
            data[at:at] = rng.choice(
                [b"[", b"]", b"\0", b"\xff", b"'", b'"""', b"[[", b"=", b"{" * 9999, b"9" * 9999]
            )
        else:
            line = rng.choice(bytes(data).split(b"\n"))
            data[at:at] = line + b"\n"
        labels.append(f"{how} {at}")
    return ", ".join(labels), bytes(data)
