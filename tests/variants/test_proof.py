"""A new mask, score term and position scheme, defined here, go through all of kvgen.

Nothing outside this file knows them. They are one registered definition each; no template, pass or command
was written for them.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgen import reference
from kvgen.bench.cases import Case
from kvgen.bench.measure import Settings
from kvgen.bench.variants import measure_variants, variants_of
from kvgen.builder import assemble
from kvgen.commands import listing
from kvgen.export.package import export
from kvgen.ir import Param, RopeSpec, Spec
from kvgen.ir.plan import Constant
from kvgen.passes.fields import FACTOR, Field, integer
from kvgen.passes.inspect import verify_binary
from kvgen.reference.rope import rope_table
from kvgen.runtime.loader import load
from kvgen.support import answers, features, page
from kvgen.variants import Definition, Formula, Position, definitions, positions, registered
from tests.support.compare import assert_attention
from tests.support.triton_calls import attend as interpreted
from tests.support.triton_calls import kernel
from tests.variants.calls import attend, params_for, spec_with

EVERY, CALM = 3, 0.75

ZEBRA = Definition(
    name="zebra",
    kind="mask",
    field=Field(integer(1, 4096), "positions of a stripe, or leave it out", None),
    doc="every other stripe of earlier keys, and the first keep keys of the request",
    source="this test",
    formula=lambda value, q_heads: Formula(
        "kv_pos <= q_pos and ((q_pos - kv_pos) // STRIPE % 2 == 0 or kv_pos < keep[batch])",
        (Constant("STRIPE", value, "positions of a stripe"),),
        (Param("keep", ("batch",), "i32"),),
    ),
    example={"causal": False, "zebra": EVERY},
    sample=lambda param, draw: draw.rng.integers(0, 9, draw.shape(param)),
    words="stripes of {value} keys",
)
HUSH = Definition(
    name="hush",
    kind="score",
    field=Field(FACTOR, "for example 0.5, or leave it out", None),
    doc="a head's loudness, less the logarithm of the distance",
    source="this test",
    formula=lambda value, q_heads: Formula(
        "score * loud[head] - CALM * log2(1 + abs(q_pos - kv_pos))",
        (Constant("CALM", float(value), "weight of the distance"),),
        (Param("loud", ("head",), "f32"),),
    ),
    example={"hush": CALM},
    order=40,
    sample=lambda param, draw: draw.rng.random(draw.shape(param)) + 0.5,
    words="hushed by {value}",
)


def golden(rope: RopeSpec) -> tuple[list[float], float]:
    """No two frequencies in a whole ratio."""
    ratio = (1 + math.sqrt(5)) / 2
    return [ratio ** (-i * dict(rope.options)["pace"]) for i in range(rope.dim // 2)], 1.25


GOLDEN = Position(
    name="golden",
    fields={"pace": Field(FACTOR, "for example 0.5")},
    doc="powers of the golden ratio",
    source="this test",
    frequencies=golden,
    example={"pace": 0.5},
)
ENTRIES = (ZEBRA, HUSH, GOLDEN)
LENS, FEW, MANY = (0, 1, 8, 57, 130), (2, 3, 1, 5, 8), (3, 2, 9, 20, 37)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered(*ENTRIES):
        yield


def spec_of(stored: str = "pre", **base: Any) -> Spec:
    rope = {"kind": "golden", "stored": stored, "pairing": "interleaved", **GOLDEN.example}
    return spec_with(base, **{**ZEBRA.example, **HUSH.example, "rope": rope})


def test_nothing_else_knows_them(repo_root: Path) -> None:
    for folder in ("kvgen", "runtime", "templates", "schedules"):
        for path in (repo_root / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".jinja", ".toml"):
                assert not any(entry.name in path.read_text() for entry in (ZEBRA, HUSH)), path


def test_templates_know_none_by_name(repo_root: Path) -> None:
    """They know that there is a predicate, a score, a sink, a rotation, and never which."""
    known = {d.name for kind in ("mask", "score") for d in definitions(kind)}
    known -= {"mask", "score", "chunk"}  # words for other things there: a chunk is a run of vectors
    known |= positions().keys() - {"default"}
    for path in (repo_root / "templates").rglob("*.jinja"):
        code = re.sub(r"\{#.*?#\}|//.*", "", path.read_text())
        assert not known & set(re.findall(r"\w+", code)), path


def test_oracle() -> None:
    """Against attention written out in numpy: what the definitions mean."""
    spec = spec_of(layout="nhd", format_k="f32", format_v="f32")
    att, kv_len, q_len = spec.attention, 21, 5
    rng = np.random.default_rng(0)
    params = params_for(spec, [kv_len], [0, q_len])
    k, v = rng.standard_normal((2, kv_len, att.kv_heads, 32)).astype(np.float32)
    q = rng.standard_normal((q_len, att.q_heads, 32)).astype(np.float32)
    lib = assemble(spec, "cpu")
    cache, table = lib.new_cache(4), np.array([[2, 0, 3]], np.int32)
    pools = {name: slab.numpy() for name, slab in cache.pools.items()}
    slots = [int(table[0, t // 8]) * 8 + t % 8 for t in range(kv_len)]
    reference.append(spec, lib.record, pools, 4, k, v, slots)
    out, _ = reference.prefill(
        spec, lib.record, pools, 4, table, [kv_len], q, [0, q_len], params=params, scales=None
    )
    angles = np.arange(kv_len)[:, None] * np.array([1.618033988749895 ** (-i * 0.5) for i in range(16)])
    turned = np.repeat(k, 2, axis=1).astype(np.float64)
    a, b = turned[..., 0::2].copy(), turned[..., 1::2].copy()
    cos, sin = 1.25 * np.cos(angles)[:, None], 1.25 * np.sin(angles)[:, None]
    turned[..., 0::2], turned[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    i, j = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)[None, :]
    seen = (j <= i) & (((i - j) // EVERY % 2 == 0) | (j < params["keep"][0]))
    for head in range(att.q_heads):
        score = q[:, head] @ turned[:, head].T * att.scale * params["loud"][head]
        score = np.where(seen, score - CALM * np.log2(1 + np.abs(i - j)), -np.inf)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        want = (weight / weight.sum(axis=1, keepdims=True)) @ v[:, head // 2]
        np.testing.assert_allclose(out[:, head], want, rtol=1e-5, atol=1e-5)


def test_cpu() -> None:
    lib = assemble(spec_of(format_k="int8-token", format_v="int8-token"), "cpu")
    for op, q_lens in (("decode", None), ("decode", FEW), ("prefill", MANY)):
        got, want = attend(lib, op, LENS, q_lens)
        assert_attention(got, want, "f32")


def test_append_turns_keys() -> None:
    """The CPU's bytes are the oracle's."""
    spec = spec_of("post", format_k="f32")
    lib = assemble(spec, "cpu")
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 6, 2, 32)).astype(np.float32)
    slots, at = [3, 4, 17, 20, 9, -1], np.array([0, 1, 7, 300, 2, 5], np.int32)
    table = rope_table(*golden(spec.attention.rope), 301)  # type: ignore[arg-type]
    assert torch.equal(lib.rope_table(301), torch.from_numpy(table))
    cache, other = lib.new_cache(3), lib.new_cache(3)
    lib.append(
        cache, torch.from_numpy(k), torch.from_numpy(v), torch.tensor(slots),
        torch.from_numpy(at), params={"rope_table": torch.from_numpy(table)},
    )  # fmt: skip
    pools = {name: slab.numpy() for name, slab in other.pools.items()}
    turned = {"positions_T": at, "params": {"rope_table": table}}
    reference.append(spec, lib.record, pools, 3, k, v, slots, **turned)
    for name, slab in cache.pools.items():
        assert torch.equal(slab, other.pools[name])


@pytest.mark.parametrize(("op", "q_lens"), [("decode", None), ("decode", FEW), ("prefill", MANY)])
def test_interpreter(op: str, q_lens: tuple[int, ...] | None) -> None:
    got, want = interpreted(op, spec_of(), LENS, q_lens)
    assert_attention(tuple(map(torch.from_numpy, got)), tuple(map(torch.from_numpy, want)), "f32")


WIDE = {"layout": "hnd", "kv_heads": 8, "group": 4, "head_dim": 64, "page_size": 16, "q_dtype": "bf16"}


@pytest.mark.parametrize(("op", "variant"), [("decode", "multi"), ("prefill", "")])
def test_machine_code(op: str, variant: str) -> None:
    """Registers stay registers."""
    found = kernel(op, spec_of(**WIDE, format_k="bf16", format_v="bf16"), "sm_90", variant).resources()
    verify_binary(op, "sm_90", found)
    assert any("loop" in facts for facts in found.values() if isinstance(facts, dict))


def test_tables() -> None:
    """What ``kvgen list`` and ``docs/support.md`` show."""
    assert "zebra" in [row["name"] for row in listing.masks()]
    assert "hush" in [row["name"] for row in listing.scores()]
    assert "golden" in [row["name"] for row in listing.positions()]
    rows = [row for row in features() if row.name.partition(",")[0] in ("zebra", "hush", "golden")]
    text = page(answers(rows, ("cpu-avx2", "sm_90")))
    assert "| zebra | decode, prefill | yes | yes |" in text
    assert "| hush | decode, prefill | yes | yes |" in text
    assert "| golden, half, post | append | yes | yes |" in text
    assert "| golden, half, pre | decode, prefill | yes | yes |" in text


def test_bench() -> None:
    """Each is timed beside the plain kernel, its outputs checked."""
    spec = spec_with({"page_size": 8})
    rows = {variant.name: variant for variant in variants_of(spec)[0]}
    assert {"zebra = 3", "hush = 0.75"} <= rows.keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kvgen.bench.variants.definitions", lambda kind: [d for d in (ZEBRA, HUSH) if d.kind == kind]
        )
        settings = Settings(rounds=2, seconds=1e6, cold_bytes=1 << 18, waited=lambda: 0)
        case = Case("decode-40", "decode", (40, 7), (1, 1))
        found = list(
            measure_variants(spec, [case], settings, lambda *words: None, lambda s: assemble(s, "cpu"))
        )
    assert [len(report.rows) for report in found] == [2, 2]


OUTSIDER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("kvgen", "sympy", "jinja2"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.path[:0] = [sys.argv[1]]
import torch, striped
given = torch.load("in.pt")
cache = striped.new_cache(4)
striped.append(cache, given["k"], given["v"], given["slots"])
params = given["params"] | {"rope_table": striped.rope_table(21)}
torch.save(striped.prefill(*given["q"], cache, *given["call"], params=params), "out.pt")
"""


def test_export(tmp_path: Path) -> None:
    """The package runs where neither kvgen nor the definitions are, and gives the same bits."""
    spec = spec_of()
    package = export(spec, tmp_path / "export", targets=["cpu-portable"], name="striped")
    noise = torch.Generator().manual_seed(2)
    params = params_for(spec, [21], [0, 5])
    del params["rope_table"]
    given = {
        "k": torch.randn(21, 2, 32, generator=noise),
        "v": torch.randn(21, 2, 32, generator=noise),
        "slots": torch.arange(21),
        "q": [torch.randn(5, 4, 32, generator=noise)],
        "call": [torch.tensor(ints, dtype=torch.int32) for ints in ([[0, 1, 2]], [21], [0, 5])],
        "params": {name: torch.from_numpy(array) for name, array in params.items()},
    }  # fmt: skip
    torch.save(given, tmp_path / "in.pt")
    command = [sys.executable, "-c", OUTSIDER, str(package.folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out.pt")
    lib = load(assemble(spec, "cpu-portable"))
    cache = lib.new_cache(4)
    lib.append(cache, given["k"], given["v"], given["slots"])
    with_table = given["params"] | {"rope_table": lib.rope_table(21)}
    want = lib.prefill(*given["q"], cache, *given["call"], params=with_table)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
