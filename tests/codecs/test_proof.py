"""Two codecs defined here go through all of kvgen: a table of odd levels, and an eight-bit float of three
bits of exponent.

Nothing outside this file knows them. They are one registered definition each; no template, pass or command
was written for them. (An export runs without kvgen in ``tests/export/test_codecs.py``, with another one.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgen import reference
from kvgen.bench.formats import formats_of
from kvgen.builder import assemble
from kvgen.commands import listing
from kvgen.ir import Spec
from kvgen.ir.codec import CODECS, Codec, float_value, registered
from kvgen.passes.inspect import faults
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.support import answers, features, page
from tests.support.bundle import prepare
from tests.support.engines import library
from tests.support.specs import make_spec
from tests.support.variants import VariantCase, check_variant, wanted_kernels

ROW = {"head": 1, "tok": 1}
ODD = Codec(
    "oddly", "table", 4, 5.0, levels=(-5.0, -2.0, -0.5, 0.0, 0.25, 1.0, 2.5, 4.0, 4.5),
    example={"group": ROW | {"d": 16}, "transform": "hadamard"},
    doc="levels of no pattern", source="this test",
)  # fmt: skip
E3M4 = Codec(
    "e3m4", "float", 8, 31.0, exponent=3, mantissa=4, bias=3,
    example={"group": ROW, "scale_dtype": "bf16"}, doc="fp8 with 3 bits of exponent", source="this test",
)  # fmt: skip
OWN = (ODD, E3M4)
DIRECT = {"f32", "f16", "bf16", "int8", "int4", "e4m3"}
"""Codecs with operands of their own, which templates may name."""


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered(*OWN):
        yield


def spec_of(codec: Codec, head_dim: int = 64, **cache: Any) -> Spec:
    """Both K and V in the codec, as its example shows it."""
    k = {"format": codec.name, **codec.example}
    attention = {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "q_dtype": "f32"}
    body = {"page_size": 16, "k": k, "v": k, **cache}
    return load_spec({"name": codec.name, "attention": attention, "cache": body})


def test_nothing_else_knows_them(repo_root: Path) -> None:
    for folder in ("kvgen", "runtime", "templates", "schedules"):
        for path in (repo_root / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".jinja", ".toml"):
                assert not any(codec.name in path.read_text() for codec in OWN), path


def test_templates_know_none_by_name(repo_root: Path) -> None:
    """They know kinds, bits and levels, and never which codec it is; old operands keep their names."""
    names = CODECS.keys() - DIRECT - {"table"}  # a word for other things there: a page table
    for path in (repo_root / "templates").rglob("*.jinja"):
        code = re.sub(r"\{#.*?#\}|//.*", "", path.read_text())
        assert not names & set(re.findall(r"\w+", code)), path


@pytest.mark.parametrize("codec", OWN, ids=lambda codec: codec.name)
def test_a_spec_says_it_and_the_oracle_stores_it(codec: Codec) -> None:
    """Every code reads back as its definition says; a value goes to the nearest, ties to the lower level."""
    plain = {key: value for key, value in codec.example.items() if key != "transform"}
    k = {"format": codec.name, **plain, "group": ROW}
    spec = load_spec(
        {"attention": {"q_heads": 1, "kv_heads": 1, "head_dim": 16, "q_dtype": "f32"},
         "cache": {"page_size": 16, "k": k, "v": k}}
    )  # fmt: skip
    assert load_spec(spec.to_dict()) == spec and Codec.from_dict(codec.to_dict()) == codec
    if codec.kind == "table":
        numbers = np.array(codec.levels)
    else:
        numbers = np.array([float_value(codec, code) for code in range(1 << codec.bits)])
        assert np.abs(numbers).max() == codec.qmax
    top = codec.qmax or 1.0
    # Each row holds the largest magnitude, so that its scale is 1.
    numbers = np.resize(numbers, (-(-len(numbers) // 15), 15)).astype(np.float32)
    rows = np.concatenate([numbers, np.full((len(numbers), 1), -top, np.float32)], axis=1)[:, None]
    record = place(spec)
    pages = -(-len(rows) // 16)
    pools = reference.new_pools(record, pages, 0xFF)
    where = (spec, record, pools, pages)
    reference.append(*where, rows, rows, np.arange(len(rows)))
    (found,), _ = reference.gather(*where, [range(pages)], [len(rows)])
    np.testing.assert_array_equal(found, rows)
    nudged = rows * np.float32(1 + 2.0**-10)
    nudged[..., -1] = -top
    reference.append(*where, np.clip(nudged, -top, top), rows, np.arange(len(rows)))
    (again,), _ = reference.gather(*where, [range(pages)], [len(rows)])
    np.testing.assert_array_equal(again, rows)


def test_the_cpu_appends_gathers_and_attends() -> None:
    specs = [spec_of(codec, keep_first=2, keep_last=9) for codec in OWN]
    cases = [VariantCase(spec, seed=1, most=90, most_q=9, batch=3) for spec in specs]
    libraries = [library("portable", spec) for spec in specs]
    wanted = [*wanted_kernels(cases[0]), ("gather", "f32")]
    prepare((lib, wanted) for lib in libraries)
    assert [check_variant(*pair, gather=True) for pair in zip(libraries, cases, strict=True)] == [[], []]


@pytest.mark.parametrize("codec", OWN, ids=lambda codec: codec.name)
def test_the_interpreter_appends_gathers_and_attends(codec: Codec) -> None:
    case = VariantCase(spec_of(codec, 32 if codec is E3M4 else 64), seed=1, most=20, most_q=3, batch=2)
    assert check_variant(library("interpret", case.spec), case, gather=True) == []


@pytest.mark.parametrize(("codec", "op"), [(ODD, "append"), (E3M4, "decode")], ids=["oddly", "e3m4"])
def test_it_compiles_for_a_gpu(codec: Codec, op: str) -> None:
    pytest.importorskip("triton")
    found = assemble(spec_of(codec), "sm_90", tune="off").resources(op)
    assert not faults(op, found), found


def test_lists_tables_and_benches_have_rows_for_them() -> None:
    listed = {row["name"]: row for row in listing.formats()}
    for codec in OWN:
        assert listed[codec.name]["what"] == codec.doc and listed[codec.name]["from"] == "this test"
    rows = [row for row in features() if row.name.split(",")[0] in ("oddly", "e3m4")]
    assert len(rows) >= 4
    text = page(answers(rows[:1], ("cpu-portable", "sm_90")))
    assert f"| {rows[0].name} | append, decode, prefill, gather | yes | yes |" in text
    spec = make_spec("bf16", "bf16", page_size=32)
    assert {"oddly", "e3m4"} <= {row.name for row in formats_of(spec)[0]}
