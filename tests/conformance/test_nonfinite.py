"""docs/numerics.md: its tables are read, the oracle is held to them, and every backend to the oracle."""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch

from kvgen.ir import Spec
from kvgen.ir.codec import CODECS
from kvgen.passes.validate import load_spec
from kvgen.runtime.cache import torch_dtype
from tests.support.bundle import prepare
from tests.support.compare import attention
from tests.support.engines import ENGINES, engine_params, library
from tests.support.nonfinite import (
    CAPPED,
    CASES,
    GROUP,
    INF,
    KV_HEADS,
    LENGTHS,
    NAN,
    ODD,
    QUERIES,
    WIDTH,
    holds,
    requests,
    table,
)
from tests.support.oracle import OracleLibrary
from tests.support.specs import FORMAT_TABLES, LAYOUTS, make_spec
from tests.support.world import World

SINK = {"sink-minus": -INF, "sink-plus": INF, "sink-nan": NAN}


def _spec(k: str, v: Any, q_dtype: str, layout: str = "hnd", **attention: Any) -> Spec:
    heads = {"q_heads": KV_HEADS * GROUP, "kv_heads": KV_HEADS, "head_dim": WIDTH, "q_dtype": q_dtype}
    strings = LAYOUTS[layout]
    sides = {"k": FORMAT_TABLES[k], "v": FORMAT_TABLES[v] if isinstance(v, str) else v}
    sides = {s: t | ({"layout": strings[s]} if s in strings else {}) for s, t in sides.items()}
    cache = {"page_size": 16, "layout": strings["cache"], **sides}
    return load_spec({"attention": heads | attention, "cache": cache})


SEGMENTS = {
    "segments": [
        {"size": 32, "format": "e4m3", "group": {"tok": 1, "head": 1}},
        {"size": 32, "format": "bf16"},
    ]
}
SPECS = {
    "f32": _spec("f32", "f32", "f32"),
    "bf16-pairs": _spec("bf16", "bf16", "bf16", "pairs"),
    "int8-quads": _spec("int8-token", "int8-token", "bf16", "quads"),
    "cap": _spec("bf16", "f16", "bf16", soft_cap=30.0, sink_logit=True),
    "segments": _spec("e4m3-token", SEGMENTS, "bf16", "two-pools-nhd"),
}
"""Plain rows, panels of pairs and quads, terms and a sink, rows that become numbers as they are read."""
BLOCK = {"int8-quads": list(range(WIDTH))}
"""Elements of V that share a scale with the odd one, where they do."""
SCALED_K = ("int8-quads", "segments")
OPS = ("single", "multi", "prefill")


@cache
def libraries(engine: str) -> dict[str, Any]:
    """All specs on one engine, whose kernels compile together where they are the CPU's."""
    found = {name: library(engine, spec) for name, spec in SPECS.items()}
    if engine not in ("oracle", "interpret"):
        kernels = [("decode", "single"), ("decode", "multi"), ("prefill", "")]
        prepare([(lib, kernels) for lib in found.values()])
    return found


@cache
def attended(engine: str, name: str, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all cases, [case, query, ...]; the oracle wrote the pages."""
    lib, spec, every = libraries(engine)[name], SPECS[name], requests()
    lens = [len(r.k) for r in every.values()]
    world = World(lib, sum(-(-n // 16) for n in lens) + 2)
    pages, lens_B = world.table(lens), world.ints(lens)
    k, v = (torch.cat([getattr(r, side) for r in every.values()]) for side in "kv")
    OracleLibrary(spec).append(world.cache, k, v, world.ints(world.slots(pages, lens), torch.int64))
    count = 1 if op == "single" else QUERIES
    q = torch.cat([r.q[-count:] for r in every.values()]).to(torch_dtype(spec.attention.q_dtype))
    starts = world.ints([0, *accumulate([count] * len(lens))])
    params = (
        {"params": {"sink_logit": world.tensor(torch.tensor([0.5, -1.0, 0.0, 2.0]))}}
        if spec.attention.sink
        else {}
    )
    args = (world.tensor(q), world.cache, pages, lens_B, *(() if op == "single" else (starts,)))
    out, lse = getattr(lib, "prefill" if op == "prefill" else "decode")(*args, **params)
    return out.unflatten(0, (-1, count)), lse.unflatten(0, (-1, count))


def words(case: str, name: str) -> tuple[str, str]:
    """What the document says of out and of lse."""
    _, out, lse, scaled = table("What attention returns")[case]
    if name == "cap" and case in CAPPED:
        return CAPPED[case], CAPPED[case]
    if name in BLOCK or (name in SCALED_K and case[0] != "v"):
        return scaled, "NaN" if scaled == "NaN" else lse
    return out, lse


def test_every_line_of_the_document_is_a_case() -> None:
    assert [*CASES, *SINK] == list(table("What attention returns"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SPECS)
def test_the_oracle_returns_what_the_document_says(name: str, op: str) -> None:
    out, lse = attended("oracle", name, op)
    for b, case in enumerate(CASES):
        out_word, lse_word = words(case, name)
        if case in LENGTHS and name == "cap":
            lse_word = "finite"  # the sink's
        odd = BLOCK.get(name, [ODD])
        rows = slice(0, 2 if case == "masked" else None)  # the third query sees the only key
        if case == "masked" and op == "single":
            out_word = lse_word = "finite"
        assert holds(out_word, out[b, rows, :GROUP], odd), (case, out_word, out[b, :, :GROUP])
        assert holds(lse_word, lse[b, rows, :GROUP], []), (case, lse_word, lse[b, :, :GROUP])
        assert out[b, :, GROUP:].isfinite().all(), case
        assert case in LENGTHS or lse[b, :, GROUP:].isfinite().all(), case


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("engine", engine_params(ENGINES[1:]))
def test_every_backend_returns_the_same(engine: str, name: str, op: str) -> None:
    got, want = attended(engine, name, op), attended("oracle", name, op)
    wrong = [
        f"{case}: {text}"
        for b, case in enumerate(CASES)
        for text in attention(
            "", (got[0][b], got[1][b]), (want[0][b], want[1][b]), SPECS[name].attention.q_dtype
        )
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("engine", engine_params(ENGINES))
def test_sinks_that_are_not_finite(engine: str, op: str) -> None:
    """A request with keys and one without; heads 1 to 3 have the odd sinks."""
    lib = libraries(engine)["cap"]
    world, lens = World(lib, 6), [40, 0]
    pages, lens_B = world.table(lens), world.ints(lens)
    k, v = world.normal(40, KV_HEADS, WIDTH), world.normal(40, KV_HEADS, WIDTH)
    OracleLibrary(lib.spec).append(world.cache, k, v, world.ints(world.slots(pages, lens), torch.int64))
    q, starts = world.query(2), () if op == "single" else (world.ints([0, 1, 2]),)
    call = getattr(lib, "prefill" if op == "prefill" else "decode")
    sinks = world.tensor(torch.tensor([0.0, *SINK.values()]))
    out, lse = call(q, world.cache, pages, lens_B, *starts, params={"sink_logit": sinks})
    for head, case in enumerate(SINK, 1):
        _, out_word, lse_word, _ = table("What attention returns")[case]
        assert holds(out_word, out[0, head], []) and holds(lse_word, lse[0, head], []), case
        bare = ("0", "-inf") if case == "sink-minus" else (out_word, lse_word)
        assert holds(bare[0], out[1, head], []) and holds(bare[1], lse[1, head], []), case
    assert (out[1, 0] == 0).all() and lse[1, 0] == 0


MERGED: dict[str, tuple[float, float]] = {
    "merge-empty": (NAN, -INF),
    "merge-none": (NAN, -INF),
    "merge-out-inf": (INF, -300.0),
    "merge-lse-nan": (1.0, NAN),
    "merge-lse-plus": (1.0, INF),
}
"""Case -> element 5 of out, and lse, of one of two states; of both for ``merge-none``."""


@pytest.mark.parametrize("engine", engine_params(ENGINES))
def test_merge(engine: str) -> None:
    said = table("What merge returns")
    assert list(said) == list(MERGED)
    lib = library(engine, make_spec("f32", "f32", kv_heads=1, group=3))
    outs, lses = torch.randn(2, len(MERGED), 3, 64), torch.randn(2, len(MERGED), 3)
    for i, (case, (value, lse)) in enumerate(MERGED.items()):
        states = slice(0, 2 if case == "merge-none" else 1)
        outs[states, i, :, 5], lses[states, i] = value, lse
    out, lse = lib.merge(outs, lses)
    for i, case in enumerate(MERGED):
        assert holds(said[case][1], out[i], [5]) and holds(said[case][2], lse[i], []), case


LARGE = 3e38


def _stored(words: str) -> tuple[list[str], str]:
    """Codecs of a line of the first table, and how their scales come."""
    names = [name for name in CODECS if name in words.replace(",", " ").split()]
    names += [name for name in ("mxfp8", "mxfp4") if name in words.replace(",", " ").split()]
    return names, "given" if "given" in words else "affine" if "affine" in words else "block"


def _gathered(fmt: str, how: str, value: float) -> torch.Tensor:
    """[32] of a row of K whose element 3 is ``value``, as the oracle stores and reads it."""
    block = {"group": {"tok": 1, "head": 1, "d": 32}} if CODECS.get(fmt) and CODECS[fmt].scaled else {}
    side = {"format": fmt} | ({"group": {}} if how == "given" else block)
    if fmt.startswith("mx"):
        side = {"format": fmt}
    side |= {"affine": True} if how == "affine" else {}
    attention = {"q_heads": 1, "kv_heads": 1, "head_dim": 64, "q_dtype": "f32"}
    spec = load_spec({"attention": attention, "cache": {"page_size": 16, "k": side, "v": {"format": "f32"}}})
    lib = OracleLibrary(spec)
    world = World(lib, 1, scales={"k": torch.tensor(0.5)} if how == "given" else None)
    row = torch.ones(1, 1, 64)
    row[0, 0, 3] = value
    lib.append(world.cache, row, torch.ones(1, 1, 64), torch.tensor([0]))
    k, _ = lib.gather(world.cache, world.ints([0]).reshape(1, 1), world.ints([1]))
    assert k[0, 0, 32:].isfinite().all(), "the row's other block"
    return k[0, 0, :32]


@pytest.mark.parametrize("line", table("What is stored"))
def test_what_is_stored(line: str) -> None:
    """On the oracle, which the bytes of every backend are held to in test_codecs.py and test_formats.py."""
    names, how = _stored(line)
    assert names
    for name in names:
        for value, word in zip((NAN, INF, -INF, LARGE), table("What is stored")[line], strict=True):
            x = _gathered(name, how, value)
            largest = 0.5 * CODECS[name].qmax if how == "given" else math.nan
            if word == "NaN block":
                assert x.isnan().all(), (name, value)
                continue
            assert x[torch.arange(32) != 3].isfinite().all(), (name, value)
            want = {"largest": largest, "-largest": -largest, "itself": LARGE}.get(word)
            want = float(word) if want is None else want
            assert torch.allclose(x[3], torch.tensor(want), rtol=0.75, equal_nan=True), (name, value, x[3])
