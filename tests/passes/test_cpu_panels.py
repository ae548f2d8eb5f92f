"""Which layouts the CPU reads as panels, and what becomes of the others."""

from __future__ import annotations

import dataclasses

import pytest

from kvgen.backends.cpu.backend import CpuBackend
from kvgen.passes.place import place
from kvgen.passes.render import render
from kvgen.targets import TARGETS
from kvgen.tune.defaults import default_schedule
from kvgen.tune.space import load_space, spec_facts
from tests.support.specs import make_spec

FULL = dataclasses.replace(TARGETS["cpu-avx512"], features=("bf16", "vnni"))


def decode(spec, target=FULL, variant="single"):
    """The plan of decode with the default schedule."""
    backend = CpuBackend()
    schedule = default_schedule(backend, "decode", spec, target, {})
    return backend.plan("decode", spec, place(spec), schedule, target, variant)


@pytest.mark.parametrize(
    ("fmt", "layout", "q_dtype", "inner"),
    [
        ("bf16", "pairs", "bf16", (2, 2)),
        ("int8-token", "quads", "bf16", (4, 4)),
        ("int4-block", "quads", "f16", (4, 4)),
        ("f16", "columns", "f16", (1, None)),  # rows of V are what a panel of single keys would be
        ("e4m3-token", "columns", "bf16", (1, None)),
        ("bf16", "hnd", "bf16", (None, None)),
        ("int8-token", "quads", "f32", (None, None)),  # no two digits hold an f32 query
        ("int8-token", "pairs", "bf16", (None, None)),  # the wrong number of codes side by side
    ],
)
def test_the_layout_decides_what_is_a_panel(fmt: str, layout: str, q_dtype: str, inner: tuple) -> None:
    answers = decode(make_spec(fmt, fmt, layout=layout, q_dtype=q_dtype, group=4)).answers
    assert tuple(p and p.inner for p in (answers["k_panel"], answers["v_panel"])) == inner


def test_pages_of_no_whole_vector_and_cpus_without_the_instructions_read_rows() -> None:
    quads = make_spec("int8-token", "int8-token", layout="quads", q_dtype="bf16")
    assert decode(quads).answers["k_digits"] == 2
    assert decode(quads, TARGETS["cpu-avx512"]).answers["k_staged"]
    assert decode(quads, TARGETS["cpu-portable"]).answers["k_staged"]
    odd = make_spec("int8-token", "int8-token", layout="quads", q_dtype="bf16", page_size=8)
    assert decode(odd).answers["k_panel"] is None and decode(odd).answers["v_panel"].inner == 4


def test_tiles_are_whole_vectors_of_panels() -> None:
    plan = decode(make_spec("bf16", "bf16", layout="pairs", q_dtype="bf16", page_size=48))
    assert plan.constant("TILE") % 16 == 0 and 48 % plan.constant("TILE") == 0


def test_panels_have_no_sums_across_lanes_and_rows_no_panels() -> None:
    panels = render(decode(make_spec("bf16", "bf16", layout="pairs", q_dtype="bf16", group=4)))
    rows = render(decode(make_spec("bf16", "bf16", q_dtype="bf16", group=4)))
    assert "sum_each" not in panels and "score_panel" in panels
    assert "sum_each" in rows and "_panel" not in rows


def test_seeds_follow_the_format() -> None:
    space = load_space("cpp/decode")
    tiles = {}
    for fmt in ("bf16", "int8-token", "int4-token"):
        spec = make_spec(fmt, fmt, q_dtype="bf16", group=4)
        tiles[fmt] = space.default(FULL, spec_facts(spec, FULL))["tile"]
    assert tiles == {"bf16": 16, "int8-token": 32, "int4-token": 64}
    portable = space.seed(TARGETS["cpu-portable"], spec_facts(make_spec(), TARGETS["cpu-portable"]))
    assert portable == space.seeds["any"] | space.seeds["portable"]
