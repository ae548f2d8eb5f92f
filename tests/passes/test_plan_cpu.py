"""Plans and renders of the CPU backend: determinism, speed-deciding choices, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from kvgen.backends.cpu.backend import CpuBackend
from kvgen.builder import assemble
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.ir import Schedule
from kvgen.ir.plan import OPS
from kvgen.ir.verify import VerifyError
from kvgen.passes.cpu_attention import whole_tile
from kvgen.passes.lower import d_parts, fold_site
from kvgen.passes.place import place
from kvgen.passes.render import render
from kvgen.passes.verify_address import verify_source
from kvgen.targets import TARGETS
from kvgen.tune.defaults import default_schedule
from tests.support.specs import covering_specs, make_spec

AVX512 = dataclasses.replace(TARGETS["cpu-avx512"], features=("bf16", "vnni"))


BF16 = make_spec(
    layout="hnd", format_k="bf16", format_v="bf16", q_dtype="bf16", kv_heads=8, group=4, head_dim=128
)


def plan(spec, op="decode", target=AVX512, variant="", **pins):
    """The plan of one op with the default schedule."""
    backend = CpuBackend()
    schedule = default_schedule(backend, op, spec, target, pins)
    return backend.plan(op, spec, place(spec), schedule, target, variant)


@pytest.mark.parametrize("spec", covering_specs(0)[::7], ids=lambda s: s.hash8)
@pytest.mark.parametrize("target", ["cpu-avx512", "cpu-avx2", "cpu-portable"])
def test_every_op_renders_the_same_twice(spec, target: str) -> None:
    for op in OPS:
        first, again = (render(plan(spec, op, TARGETS[target])) for _ in range(2))
        assert first == again
        assert spec.hash8 in first


def test_the_name_of_a_spec_is_not_in_its_kernels() -> None:
    one = make_spec(layout="hnd")
    assert render(plan(one)) == render(plan(dataclasses.replace(one, name="other")))


def test_the_layout_decides_how_rows_are_read() -> None:
    row = plan(BF16).answers
    packed = plan(make_spec(layout="packed-k")).answers
    assert (row["k_staged"], packed["k_staged"], packed["k_run"]) == (False, True, 8)


def test_a_bf16_query_over_bf16_rows_multiplies_pairs_only_where_the_cpu_can() -> None:
    spec = BF16
    assert "dot_pairs" in render(plan(spec))
    assert "dot_pairs" not in render(plan(spec, target=TARGETS["cpu-avx512"]))
    assert "dot_pairs" not in render(plan(spec, target=TARGETS["cpu-avx2"]))


def test_features_that_are_off_leave_no_trace() -> None:
    source = render(plan(BF16))
    for absent in ("k_scale", "v_scale", "WINDOW", "MASKED", "stage_", "q_starts"):
        assert absent not in source


def test_scales_fold_where_they_are_cheapest() -> None:
    for fmt, k_site, v_site in (
        ("bf16", "none", "none"),
        ("int8-tensor", "score_scale", "output"),
        ("int8-head", "score_scale", "output"),
        ("int8-token", "score_column", "weight_column"),
    ):
        spec = make_spec(layout="hnd", format_k=fmt, format_v=fmt)
        assert (fold_site(spec, "k").site, fold_site(spec, "v").site) == (k_site, v_site)


@pytest.mark.parametrize(
    ("size", "parts"),
    [(72, [64, 8]), (80, [64, 16]), (96, [64, 32]), (112, [64, 32, 16]), (128, [128]), (576, [512, 64])],
)
def test_head_dims_are_cut_into_parts(size: int, parts: list[int]) -> None:
    found = d_parts(size, 512, 16)
    assert [p.valid for p in found] == parts
    assert [p.start for p in found] == [sum(parts[:i]) for i in range(len(parts))]


@pytest.mark.parametrize(
    ("tokens", "page", "tile"), [(32, 16, 32), (16, 5, 15), (32, 256, 32), (32, 48, 24), (16, 1, 16)]
)
def test_tiles_are_whole_pages_or_whole_parts_of_one(tokens: int, page: int, tile: int) -> None:
    assert whole_tile(tokens, page) == tile


def test_pins_are_checked() -> None:
    spec = BF16
    assert plan(spec, split_tokens=256).constant("SPLIT") == 256
    with pytest.raises(ArgumentError, match="no such knob"):
        plan(spec, tile_size=3)
    with pytest.raises(ArgumentError, match="give for example"):
        plan(spec, tile="big")
    with pytest.raises(ArgumentError, match="breaks the constraint"):
        plan(spec, heads=3)


def test_unknown_variants_are_refused_before_compile() -> None:
    spec = BF16
    with pytest.raises(UnsupportedError, match="append has no variant 'int8'"):
        plan(spec, "append", variant="int8")
    broken = Schedule.of({**plan(spec).schedule.to_dict(), "row_block": 3})
    with pytest.raises(UnsupportedError, match="row_block = 3"):
        CpuBackend().plan("decode", spec, place(spec), broken, AVX512)


def test_a_bad_render_is_caught() -> None:
    found = plan(BF16)
    source = render(found)
    for broken in (
        source.replace(found.spec.hash8, "00000000"),
        source + "// {{ left over }}\n",
        source.replace("GROUP", "GROUPS", source.count("GROUP")).replace("int GROUPS", "int GROUP"),
        source + "// caf\u00e9\n",
    ):
        with pytest.raises(VerifyError):
            verify_source(found, broken)


def test_sources_need_no_compiler(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    library = assemble(BF16, "cpu")
    assert all("kvgen" in library.source(op) for op in OPS)
