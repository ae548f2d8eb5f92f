"""Specs for tests: random ones (hypothesis), and a covering array of the ones people use.

``covering(factors, seed)`` is the greedy algorithm of AETG (Cohen et al. 1997): every row starts from a
combination that is still uncovered and gives each further factor the value that covers most. Two-wise
by default; ``strength=3`` for the slow run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import gcd
from typing import Any

from hypothesis import strategies as st

from kvgen.ir import LayoutSpec, Spec
from kvgen.ir.quant import FORMATS
from kvgen.passes.validate import load_spec

FORMAT_TABLES: dict[str, dict[str, Any]] = {
    "f32": {"format": "f32"},
    "bf16": {"format": "bf16"},
    "f16": {"format": "f16"},
    "int8-tensor": {"format": "int8", "group": {}},
    "int8-head": {"format": "int8", "group": {"head": 1}},
    "int8-token": {"format": "int8", "group": {"tok": 1, "head": 1}},
    "int8-block": {"format": "int8", "group": {"tok": 1, "head": 1, "d": 16}},
    "int4-head": {"format": "int4", "group": {"head": 1}},
    "int4-token": {"format": "int4", "group": {"tok": 1, "head": 1}},
    "int4-block": {"format": "int4", "group": {"tok": 1, "head": 1, "d": 16}},
    "e4m3-tensor": {"format": "e4m3", "group": {}},
    "e4m3-token": {"format": "e4m3", "group": {"tok": 1, "head": 1}},
    "e4m3-block": {"format": "e4m3", "group": {"tok": 1, "head": 1, "d": 16}},
}
"""Name in a covering array -> the ``[cache.k]`` or ``[cache.v]`` table."""

LAYOUTS: dict[str, dict[str, str]] = {
    "hnd": {"cache": "page kv head tok d"},
    "nhd": {"cache": "page kv tok head d"},
    "halves-nhd": {"cache": "kv page tok head d"},
    "halves-hnd": {"cache": "kv page head tok d"},
    "two-pools-nhd": {"cache": "page tok head d"},
    "two-pools-hnd": {"cache": "page head tok d"},
    "head-outside": {"cache": "kv head page tok d"},
    "token-record": {"cache": "page tok kv head d"},
    "head-record": {"cache": "page head kv tok d"},
    "packed-k": {"cache": "page kv head tok d", "k": "head d/8 tok d%8"},
    "packed-k-two-pools": {"cache": "page head tok d", "k": "page head d/8 tok d%8"},
    "transposed-v": {"cache": "kv page head tok d", "v": "page head d tok"},
    "quads": {"cache": "page kv head tok d", "k": "head d/4 tok d%4", "v": "head tok/4 d tok%4"},
    "pairs": {"cache": "page kv head tok d", "k": "head d/2 tok d%2", "v": "head tok/2 d tok%2"},
    "columns": {"cache": "page kv head tok d", "k": "head d tok", "v": "head tok d"},
}
"""Name -> the cache's layout and the overrides of K and of V."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "format_k": tuple(FORMAT_TABLES),
    "format_v": tuple(FORMAT_TABLES),
    "layout": tuple(LAYOUTS),
    "page_size": (1, 5, 8, 16, 32, 64, 128, 256),
    "kv_heads": (1, 4, 8),
    "group": (1, 3, 4, 5, 7, 8, 16),
    "head_dim": (32, 64, 72, 80, 96, 112, 128, 192, 256),
    "mask": ((True, None), (True, 0), (True, 33), (False, None), (False, 33)),
    "q_dtype": ("bf16", "f16", "f32"),
}
"""What the base grid of conformance.md varies; ``mask`` is (causal, window)."""


def covering(
    factors: Mapping[str, Sequence[Any]], seed: int = 0, strength: int = 2
) -> Iterator[dict[str, Any]]:
    """Rows in which every combination of values of any ``strength`` factors occurs. Same seed, same rows."""
    rng = random.Random(seed)
    names = list(factors)
    strength = min(strength, len(names))
    # Values travel as positions, so that they need not be hashable. A dict is an ordered set.
    todo = {
        tuple(zip(where, at, strict=True)): None
        for where in combinations(range(len(names)), strength)
        for at in product(*(range(len(factors[names[i]])) for i in where))
    }
    while todo:
        row = dict(next(iter(todo)))
        rest = [i for i in range(len(names)) if i not in row]
        rng.shuffle(rest)
        for i in rest:
            values = list(range(len(factors[names[i]])))
            rng.shuffle(values)
            row[i] = max(values, key=lambda value: _gain(todo, row, i, value, strength))
        for cells in combinations(sorted(row.items()), strength):
            todo.pop(cells, None)
        yield {names[i]: factors[names[i]][value] for i, value in sorted(row.items())}


def _gain(todo: dict[Any, None], row: dict[int, int], i: int, value: int, strength: int) -> int:
    """How many uncovered combinations ``row`` with factor ``i`` at ``value`` would cover."""
    known = combinations(row.items(), strength - 1)
    return sum(tuple(sorted((*cells, (i, value)))) in todo for cells in known)


def covering_specs(seed: int = 0, *, strength: int = 2, **choices: Sequence[Any]) -> list[Spec]:
    """Specs covering all pairs of the values in ``FACTORS``; keywords narrow or replace a factor.

    For example ``covering_specs(head_dim=(64, 72), page_size=(1, 16))``. A keyword that is no factor
    is a TypeError.
    """
    if unknown := choices.keys() - FACTORS.keys():
        raise TypeError(f"no factors: {sorted(unknown)}")
    return [make_spec(**row) for row in covering({**FACTORS, **choices}, seed, strength)]


def make_spec(
    format_k: str = "bf16",
    format_v: str = "bf16",
    layout: str = "hnd",
    page_size: int = 16,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    mask: tuple[bool, int | None] = (True, None),
    q_dtype: str = "f32",
    align: int = 64,
) -> Spec:
    """One spec from a row of a covering array; the name lists what it is made of."""
    words = [format_k, format_v, layout, page_size, f"{kv_heads}x{group}", head_dim, *mask, q_dtype]
    attention = {
        "q_heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "q_dtype": q_dtype,
        "causal": mask[0],
        "window": mask[1],
    }
    strings = LAYOUTS[layout]
    sides = {
        side: fitted(name, head_dim)
        | ({"layout": _fitted_layout(strings[side], name, page_size, head_dim)} if side in strings else {})
        for side, name in (("k", format_k), ("v", format_v))
    }
    cache = {"page_size": page_size, "align": align, "layout": strings["cache"], **sides}
    return load_spec({"name": "-".join(map(str, words)), "attention": attention, "cache": cache})


def fitted(name: str, width: int) -> dict[str, Any]:
    """The table called ``name``; without blocks of d where they do not tile rows of ``width``."""
    table = FORMAT_TABLES[name]
    group = table.get("group", {})
    if "d" in group and (stored(name, width) % group["d"] or group["d"] >= width):
        return table | {"group": {dim: block for dim, block in group.items() if dim != "d"}}
    return table


def stored(name: str, width: int) -> int:
    """Stored elements of a row of ``width``."""
    return width // FORMATS[FORMAT_TABLES[name]["format"]].packed


def _fitted_layout(text: str, name: str, page_size: int, width: int) -> str:
    """``text`` with blocks that divide what they split, the nearest smaller ones; 1 is no split."""
    sizes = {"d": stored(name, width), "tok": page_size}
    words = []
    for word in text.split():
        dim, mark, block = re.fullmatch(r"([a-z]+)([/%]?)(\d*)", word).groups()  # type: ignore[union-attr]
        near = gcd(int(block or 1), sizes.get(dim, 1))
        if not mark:
            words.append(word)
        elif near > 1:
            words.append(f"{dim}{mark}{near}")
        elif mark == "/":
            words.append(dim)
    return " ".join(words)


@st.composite
def raw_specs(draw: st.DrawFn) -> dict[str, Any]:
    """A legal raw spec: any order of axes, any splits, ``kv`` anywhere or nowhere, overrides, odd sizes."""
    page_size = draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16]))
    head_dim, v_head_dim = draw(_dims), draw(st.none() | _dims)
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 3, 8]))
    # A split of d in the shared string must suit K and V.
    common = _divisors(gcd(head_dim, v_head_dim or head_dim) // 2)  # two codes may share an element
    words = draw(_orders(("page", "head", "tok", "d"), page_size, common))
    if draw(st.booleans()):
        first_d = min(i for i, word in enumerate(words) if word.startswith("d"))
        words.insert(draw(st.integers(0, first_d)), "kv")
    sides = {}
    for side, width in (("k", head_dim), ("v", v_head_dim or head_dim)):
        name = draw(st.sampled_from(list(FORMAT_TABLES)))
        sides[side] = dict(fitted(name, width))
        if draw(st.booleans()):
            outer, inner = LayoutSpec.parse(" ".join(words)).split()
            dims = tuple({axis.dim: None for axis in inner})
            # An override names whole dimensions, so it cannot hold one half of a tok that kv splits.
            if "tok" not in dims or "tok" not in {axis.dim for axis in outer}:
                sides[side]["layout"] = " ".join(
                    draw(_orders(dims, page_size, _divisors(stored(name, width))))
                )
    attention = {"q_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim}
    if v_head_dim is not None:
        attention["v_head_dim"] = v_head_dim
    align = 1 << draw(st.integers(0, 12))
    return {
        "name": draw(st.sampled_from(["a", "llama 8B", "x.y"])),
        "attention": attention,
        "cache": {"page_size": page_size, "align": align, "layout": " ".join(words), **sides},
    }


def specs() -> st.SearchStrategy[Spec]:
    """Loaded random specs."""
    return raw_specs().map(load_spec)


_dims = st.sampled_from([16, 24, 40, 64, 72, 80, 128, 136, 192, 576])


def _divisors(size: int) -> list[int]:
    return [block for block in range(2, size + 1) if size % block == 0]


@st.composite
def _orders(draw: st.DrawFn, dims: tuple[str, ...], page_size: int, d_blocks: list[int]) -> list[str]:
    """A legal order of axes: ``page`` left of every d axis, outer halves left of inner ones."""
    words = _halves("d", draw(st.none() | st.sampled_from(d_blocks)))
    if "page" in dims:
        words.insert(0, "page")
    tok_blocks = _divisors(page_size)
    tok = _halves("tok", draw(st.none() | st.sampled_from(tok_blocks)) if tok_blocks else None)
    low = 0
    for word in tok if "tok" in dims else []:
        at = draw(st.integers(low, len(words)))
        words.insert(at, word)
        low = at + 1
    if "head" in dims:
        words.insert(draw(st.integers(0, len(words))), "head")
    return words


def _halves(dim: str, block: int | None) -> list[str]:
    return [dim] if block is None else [f"{dim}/{block}", f"{dim}%{block}"]
