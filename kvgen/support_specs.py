"""support_specs: what no target serves, as the spec itself is refused: a section of ``docs/support.md``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from kvgen.errors import SpecError
from kvgen.passes.validate import validate

TITLE = "Refused on every target"

PLAIN: Mapping[str, Any] = {
    "attention": {"q_heads": 32, "kv_heads": 8, "head_dim": 128},
    "cache": {"page_size": 16, "k": {"format": "int8"}, "v": {"format": "int8"}},
}

REFUSED: Mapping[str, Mapping[str, Any]] = {
    "head_dim that is no multiple of 8": {"attention.head_dim": 100},
    "one scale for all heads of a token": {"cache.k.group": {"tok": 1}},
    "blocks of d that cut packed codes": {
        "attention.head_dim": 96,
        "cache.k": {"format": "int2", "group": {"tok": 1, "head": 1, "d": 32}},
    },
    "blocks of tokens over two pages": {"cache.k.group": {"head": 1, "tok": 32, "d": 1}},
    "kv inside d": {"cache.layout": "page head d tok kv"},
    "page inside d": {"cache.layout": "kv head d page tok"},
    "split heads": {"cache.layout": "page kv head/2 tok head%2 d"},
    "scales behind rows whose d is split": {
        "cache.k.scales": "inline",
        "cache.layout": "page kv head d/8 tok d%8",
    },
    "one scale for several tokens behind each row": {
        "cache.k": {"format": "int8", "group": {"head": 1, "tok": 16, "d": 1}, "scales": "inline"}
    },
    "minima beside small floats": {"cache.k": {"format": "e4m3", "affine": True}},
    "minima beside e8m0 scales": {"cache.k": {"format": "int8", "affine": True, "scale_dtype": "e8m0"}},
    "an outer scale with minima": {"cache.k": {"format": "int8", "affine": True, "outer": {}}},
    "Hadamard of rows that are no power of two": {
        "attention.head_dim": 96,
        "cache.k.transform": "hadamard",
    },
    "Hadamard, or a mean, and K rotated when read": {
        "attention.rope": {"stored": "pre"},
        "cache.k.transform": "hadamard",
    },
    "a mean of V": {"cache.v.mean": True},
    "8-bit weights over float codes": {"attention.pv": "int8", "cache.v": {"format": "e4m3"}},
    "8-bit weights with raw tokens": {"attention.pv": "int8", "cache.keep_first": 4},
    "V inside packed K": {"cache.k.format": "int4", "cache.v": {"alias": "k"}},
    "raw tokens of a cache that is not quantised": {
        "cache.k": {"format": "bf16"},
        "cache.v": {"format": "bf16"},
        "cache.keep_first": 4,
    },
}
"""What is wanted, and the keys that ask for it."""


def refused_specs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of ``REFUSED`` as a whole spec."""
    for name, changes in REFUSED.items():
        raw = copy.deepcopy(dict(PLAIN))
        for path, value in changes.items():
            *tables, key = path.split(".")
            table = raw
            for part in tables:
                table = table[part]
            table[key] = value
        yield name, raw


def refusals() -> Iterator[tuple[str, str]]:
    """Each of ``REFUSED`` with what kvgen says of it."""
    for name, raw in refused_specs():
        try:
            validate(raw)
        except SpecError as error:
            yield name, str(error.diagnostics[0])
        else:
            raise AssertionError(f"{name} is not refused any more: take it off the list")


def section() -> str:
    """The section, as markdown."""
    rows = [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in refusals()]
    return "\n".join([f"## {TITLE}", "", "| | what kvgen says |", "|---|---|", *rows])
