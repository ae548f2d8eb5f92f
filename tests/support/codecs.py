"""Specs over all codecs: what a side's storage may be in every combination of two, beside attention's.

A *side* is the storage of K or of V. The covering array of sides comes from the registry, so a codec that is
registered takes part. Two sides and one line of attention's own covering array make a spec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, cycle
from typing import Any

from kvgen.errors import SpecError
from kvgen.ir import Spec
from kvgen.ir.codec import CODECS
from kvgen.passes.validate import load_spec
from tests.support.engines import CPU_ROWS
from tests.support.specs import LAYOUTS, covering
from tests.support.variants import VariantCase

ROW = {"head": 1, "tok": 1}
GROUPS: dict[str, dict[str, int]] = {
    "head": {"head": 1},
    "row": ROW,
    "block": ROW | {"d": 16},
    "channel": {"head": 1, "tok": 16, "d": 1},
    "span": {"head": 1, "tok": 16},
}
SIDES: dict[str, tuple[Any, ...]] = {
    "group": tuple(GROUPS),
    "scale_dtype": ("f32", "f16", "bf16", "e8m0", "e4m3"),
    "scales": ("page", "pool", "inline"),
    "extra": (None, "transform", "mean", "outer"),
}
ATTENTION: dict[str, tuple[Any, ...]] = {
    "layout": ("hnd", "nhd", "two-pools-nhd", "head-outside", "columns"),
    "heads": ((1, 8, 64), (2, 3, 32), (2, 1, 48), (1, 4, 128)),
    "terms": ({}, {"window": 33}, {"soft_cap": 20.0}, {"bool_mask": "bits", "causal": False}),
    "raw": ({}, {"keep_first": 3}, {"keep_last": 20}, {"keep_first": 5, "keep_last": 16}),
    "page_size": (16, 32, 48),
    "q_dtype": ("bf16", "f16", "f32"),
    "where": ("end", "begin"),
    "row": CPU_ROWS,
}
"""What else varies; ``heads`` is (KV heads, group, head_dim)."""
BF16 = {"format": "bf16"}
EXTRAS = {"transform": "hadamard", "mean": True, "outer": {}}
FALLBACKS: tuple[Mapping[str, Any], ...] = (
    {"outer": None},
    {"mean": None},
    {"transform": None},
    {"scales": None},
    {"scale_dtype": None},
    {"group": ROW},
    {"group": None},
)
"""What is taken back, as little as does, where a side has what its codec cannot: a combination of three that
is refused must not cost those of two."""


def sides(strength: int = 2, groups: Sequence[str] = tuple(GROUPS)) -> list[dict[str, Any]]:
    """Every legal storage table of the covering array, each once."""
    free = [(c.name, affine) for c in CODECS.values() if c.scaled and not c.keys for affine in _affine(c)]
    rows = list(covering({"codec": free, **SIDES, "group": groups}, 0, strength))
    rows += [{"codec": (c.name, False), "extra": e} for c in CODECS.values() for e in (None, "transform")
             if c.keys or not c.scaled]  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        table = legal(_table(row))
        found[json.dumps(table, sort_keys=True)] = table
    return list(found.values())


def _affine(codec: Any) -> tuple[bool, ...]:
    return (False, True) if codec.integer else (False,)


def _table(row: Mapping[str, Any]) -> dict[str, Any]:
    name, affine = row["codec"]
    own = {key: value for key, value in CODECS[name].example.items() if key not in ("group", "affine")}
    table: dict[str, Any] = {"format": name, **own}
    if "group" in row:
        table |= {key: row[key] for key in ("scale_dtype", "scales")} | {"group": GROUPS[row["group"]]}
    table |= {"affine": True} if affine else {}
    return table | ({row["extra"]: EXTRAS[row["extra"]]} if row["extra"] else {})


def legal(table: dict[str, Any], width: int = 128) -> dict[str, Any]:
    """``table`` without what its codec cannot have."""
    for taken in (some for count in range(len(FALLBACKS) + 1) for some in combinations(FALLBACKS, count)):
        tried = {**table, **{key: value for keys in taken for key, value in keys.items()}}
        table_of = {key: value for key, value in tried.items() if value is not None}
        try:
            load_spec(
                {"attention": _heads(1, 1, width), "cache": {"page_size": 48, "k": table_of, "v": BF16}}
            )
        except SpecError:
            continue
        return table_of
    raise AssertionError(f"no legal form of {table}")


def _heads(kv_heads: int, group: int, head_dim: int) -> dict[str, int]:
    return {"q_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim}


def codec_spec(k: dict[str, Any], v: dict[str, Any], line: Mapping[str, Any]) -> Spec:
    """One spec; what does not go together with the rest of it is taken back."""
    width = line["heads"][2]
    strings = LAYOUTS[line["layout"]]
    tables = {}
    for side, own in (("k", k), ("v", {key: value for key, value in v.items() if key != "mean"})):
        table = legal(own, width)
        tables[side] = table | ({"layout": strings[side]} if side in strings else {})
    attention = {**_heads(*line["heads"]), "q_dtype": line["q_dtype"], **line["terms"]}
    cache = {"page_size": line["page_size"], "layout": strings["cache"], **line["raw"], **tables}
    name = "-".join([k["format"], v["format"], line["layout"], line["q_dtype"], *line["raw"]])
    for plain in ({}, {"layout": LAYOUTS["hnd"]["cache"]}):
        if plain:
            cache |= {side: {**tables[side]} for side in "kv"}
            for side in "kv":
                cache[side].pop("layout", None)
        try:
            return load_spec({"name": name, "attention": attention, "cache": cache | plain})
        except SpecError as error:
            reason = error
    raise reason


def cases(
    strength: int = 2,
    attention: Mapping[str, Sequence[Any]] = ATTENTION,
    only: int | None = None,
    groups: Sequence[str] = tuple(GROUPS),
    **options: Any,
) -> Iterator[tuple[str, VariantCase]]:
    """(CPU row, case), two sides a spec; the seed of a case is its position. ``only``: so many of them;
    ``groups``: those of ``GROUPS`` that take part."""
    every = sides(strength, groups)
    if only is not None:
        every = [every[i * len(every) // (2 * only)] for i in range(2 * only)]
    # K and V are far apart in the list, so that codecs meet others.
    half = -(-len(every) // 2)
    pairs = list(zip(every[:half], [*every[half:], every[0]], strict=False))
    lines = list(covering(attention, 0, strength))
    for seed, (line, (k, v)) in enumerate(zip(cycle(lines), pairs, strict=False)):
        if "mean" in v or (seed % 2 and "mean" not in k):
            k, v = v, k
        row, where = line.get("row", ""), line.get("where", "end")
        yield row, VariantCase(codec_spec(k, v, line), seed, where, **options)
