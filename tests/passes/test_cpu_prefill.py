"""Plans of prefill on the CPU: what is multiplied as bf16 pairs, what is read in place, how V is cut."""

from __future__ import annotations

import dataclasses

import pytest

from kvgen.backends.cpu.backend import CpuBackend
from kvgen.ir import Spec
from kvgen.ir.plan import KernelPlan
from kvgen.passes.cpu_prefill import PanelSide
from kvgen.passes.place import place
from kvgen.passes.render import render
from kvgen.targets import TARGETS
from kvgen.tune.defaults import default_schedule
from tests.support.specs import make_spec

AVX512 = dataclasses.replace(TARGETS["cpu-avx512"], features=("bf16",))


def planned(spec: Spec, target: object = AVX512) -> KernelPlan:
    """The plan of prefill with the default schedule."""
    backend = CpuBackend()
    schedule = default_schedule(backend, "prefill", spec, target, {})  # type: ignore[arg-type]
    return backend.plan("prefill", spec, place(spec), schedule, target)  # type: ignore[arg-type]


def sides(spec: Spec, target: object = AVX512) -> tuple[PanelSide, PanelSide]:
    """K and V of the plan."""
    answers = planned(spec, target).answers
    return answers["k_side"], answers["v_side"]


@pytest.mark.parametrize(
    ("stored", "q_dtype", "words"),
    [
        ("bf16", "bf16", 2),
        ("int8-token", "bf16", 2),
        ("int4-block", "bf16", 2),
        ("e4m3-token", "bf16", 2),
        ("f16", "bf16", 1),  # eleven bits do not fit
        ("f32", "bf16", 1),
        ("bf16", "f16", 1),  # nor do those of the query
        ("int8-token", "f32", 1),
    ],
)
def test_pairs_are_multiplied_only_where_nothing_is_rounded(stored: str, q_dtype: str, words: int) -> None:
    spec = make_spec(stored, stored, q_dtype=q_dtype)
    assert [side.words for side in sides(spec)] == [words, words]
    assert [side.words for side in sides(spec, TARGETS["cpu-avx512"])] == [1, 1]
    assert [side.words for side in sides(spec, TARGETS["cpu-avx2"])] == [1, 1]


def test_a_query_rounded_to_int8_is_exact_in_pairs_whatever_it_was() -> None:
    spec = make_spec("int8-token", "int8-token", q_dtype="f32")
    rough = dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, qk="int8", pv="int8"))
    assert [side.words for side in sides(rough)] == [2, 2]
    assert "q_scale" in render(planned(rough)) and "q_scale" not in render(planned(spec))


def test_rows_are_read_in_place_where_vectors_fit_them() -> None:
    for spec, copied in (
        (make_spec("bf16", "bf16", head_dim=128, q_dtype="bf16"), False),
        (make_spec("bf16", "bf16", head_dim=72, q_dtype="bf16"), True),  # a vector would read past the row
        (make_spec("bf16", "bf16", "pairs", head_dim=128, q_dtype="bf16"), True),
        (make_spec("int8-token", "int8-token", head_dim=128, q_dtype="bf16"), True),
    ):
        assert [side.copied for side in sides(spec)] == [copied, copied]


def test_parts_of_v_keep_within_a_block_of_scales_and_cover_it() -> None:
    for name, width in (("bf16", 72), ("int8-block", 80), ("int4-block", 96), ("int8-block", 256)):
        _, v = sides(make_spec(name, name, head_dim=width, q_dtype="bf16"))
        at = 0
        for chunk in v.chunks:
            assert chunk["start"] == at and chunk["block"] == at // v.block
            at = min(at + chunk["count"] * 16, (chunk["block"] + 1) * v.block)
        assert at == width


def test_only_values_that_may_be_infinite_and_unseen_are_looked_at() -> None:
    assert "rough" in render(planned(make_spec("bf16", "bf16", q_dtype="bf16")))
    for spec in (
        make_spec("bf16", "bf16", mask=(False, None), q_dtype="bf16"),
        make_spec("int8-token", "int8-token", q_dtype="bf16"),
    ):
        assert "rough" not in render(planned(spec))
