"""bench --variants: rows come from the registry, each held against the kernel that differs in one thing."""

from __future__ import annotations

import pytest

from kvgen.bench import bench, variants
from kvgen.bench.cases import CASES, VARIANT_CASES, free
from kvgen.bench.report import OK
from kvgen.bench.variants import variants_of
from kvgen.errors import ArgumentError
from kvgen.passes.fields import SWITCH, Field
from kvgen.variants import Definition, Formula, definitions, registered
from tests.bench.conftest import F32, INT8, SMALL
from tests.support.bundle import prepare
from tests.support.engines import library

EVERY_OTHER = Definition(
    "every_other",
    "mask",
    Field(SWITCH, "true, or leave it out", None),
    "every other key",
    "this test",
    lambda value, q_heads: Formula("kv_pos % 2 == 0"),
    {"causal": True, "every_other": True},
)


def test_every_definition_has_a_row_and_so_have_those_that_are_asked_for() -> None:
    found, refused = variants_of(F32)
    assert not refused
    assert {variant.name.partition(" = ")[0] for variant in found} == {d.name for d in definitions()}
    assert {"window = 512", "soft_cap = 20.0", "sink_logit = true"} <= {variant.name for variant in found}
    with registered(EVERY_OTHER):
        assert "every_other = true" in [variant.name for variant in variants_of(F32)[0]]


def test_a_variant_differs_from_its_plain_kernel_in_one_key() -> None:
    for variant in variants_of(F32)[0]:
        plain, spec = (each.to_dict()["attention"] for each in (variant.plain, variant.spec))
        key = variant.name.partition(" = ")[0]
        assert {name for name in plain | spec if plain.get(name) != spec.get(name)} - {"params"} == {key}
        assert (variant.beside == F32.name) == (variant.plain.hash == F32.hash)


def test_what_cannot_stand_in_a_spec_is_named_with_the_reason() -> None:
    from kvgen import load_spec

    raw = F32.to_dict()
    tree = load_spec({**raw, "attention": {**raw["attention"], "causal": False, "tree": True}})
    found, refused = variants_of(tree)
    assert "tree = true" not in [variant.name for variant in found]
    assert "set causal = false" in refused["window = 33"]


def test_only_attention_has_variants() -> None:
    with pytest.raises(ArgumentError, match="--case append-8: masks and scores take part in decode and"):
        bench([F32], [CASES["append-8"]], threads=1, settings=SMALL, variants=True)


def test_the_default_cases_exist() -> None:
    assert all(CASES[name].q_lens for name in VARIANT_CASES)


def test_variants_are_right_and_timed_beside_their_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of every kind, and one of a test's own."""
    chosen = ("window", "bool_mask", "kv_first", "soft_cap", "sink_logit", "every_other")
    with registered(EVERY_OTHER):
        monkeypatch.setattr(
            variants, "definitions", lambda kind: [d for d in definitions(kind) if d.name in chosen]
        )
        specs = {each.hash: each for found in variants_of(INT8)[0] for each in (found.plain, found.spec)}
        launched = [("append", "bf16"), ("decode", "multi")]
        prepare((library("portable", spec), launched) for spec in specs.values())
        found = list(
            variants.measure_variants(
                INT8, free([2], 40, 3), SMALL, lambda *said: None, lambda spec: library("portable", spec)
            )
        )
    assert len(found) == len(chosen) + 1
    assert not [case.left_out for case in found if case.left_out]
    assert [f"{case.case}: {row}" for case in found for row in case.rows if row.status != OK] == []
    for case in found:
        plain, variant = case.rows
        assert variant.ratios[plain.spec or ""].median > 0
    assert found[0].case == "decode-2x40-q3: window = 33"
