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
from tests.support.specs import covering_specs, make_spec

FIRST: list[tuple[str, Spec]] = [
    ("portable", SPEC),
    ("portable", make_spec("int8-token", "int8-token", page_size=8, kv_heads=2, group=2, head_dim=32)),
    ("portable", make_spec("int8-head", "f32", page_size=8, kv_heads=2, group=2, head_dim=32)),
]
"""Those that other tests compile too."""

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
    more = [UNEVEN, *covering_specs(7, **small)]
    return [*FIRST, *zip(rows(), more, strict=False)][:count]


RAW: dict[str, Any] = {
    "name": "fuzz",
    "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 0.5, "window": 7, "causal": True},
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
[cache]
page_size = 4
layout = "page kv head tok d"
[cache.k]
format = "int8"
group = { tok = 1, head = 1 }
[cache.v]
format = "bf16"
"""
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
        how = rng.choice(["drop", "junk", "junk", "rename", "layout", "nest"])
        if how == "drop":
            table.pop(key, None)
        elif how == "rename":
            table[rng.choice([5, None, f"{key!r}s", ("a",), b"k", "\ud800", "k" * 9999])] = table.pop(key, 1)
        elif how == "layout":
            table[key] = " ".join(rng.choices(WORDS, k=rng.randrange(7)))
        elif how == "nest":
            table[key] = _nested(rng.choice([1, 3, 20_000]))
        else:
            table[key] = spoil.junk(rng)
        labels.append(f"{how} {'.'.join(path)}")
    return ", ".join(labels), found


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
