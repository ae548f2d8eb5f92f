"""bench --formats: a row for each registered codec, beside bf16 of the same spec."""

from __future__ import annotations

import pytest

from kvgen.bench import formats
from kvgen.bench.cases import free
from kvgen.bench.formats import MORE, formats_of
from kvgen.bench.report import OK
from kvgen.commands.bench_report import FORMAT_COLUMNS, format_row
from kvgen.ir.codec import CODECS, Codec, registered
from tests.bench.conftest import INT8, SMALL
from tests.support.bundle import prepare
from tests.support.engines import library
from tests.support.specs import make_spec

ODD = Codec("odd_levels", "table", 4, 5.0, levels=(-5.0, -2.0, -0.5, 0.0, 0.25, 1.0, 2.5, 4.0, 4.5),
            example={"group": {"head": 1, "tok": 1}})  # fmt: skip


def test_every_codec_has_a_row_and_so_has_one_of_a_test() -> None:
    spec = make_spec("f32", "f32", page_size=32, head_dim=64)
    found, refused = formats_of(spec)
    assert not refused
    assert {row.name for row in found} == set(CODECS) - {"bf16"} | set(MORE)
    for row in found:
        assert row.plain.cache.k.format == row.plain.cache.v.format == "bf16"
        assert row.spec.attention == row.plain.attention == spec.attention
    with registered(ODD):
        assert "odd_levels" in {row.name for row in formats_of(spec)[0]}


def test_what_a_spec_cannot_hold_is_named_with_the_reason() -> None:
    refused = formats_of(make_spec("bf16", "bf16", head_dim=72))[1]
    assert "power of two" in refused["lloyd3"]


def test_formats_are_right_and_timed_beside_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: CODECS[name] for name in ("bf16", "int8", "int4", "e4m3")}
    monkeypatch.setattr(formats, "CODECS", chosen)
    monkeypatch.setattr(formats, "MORE", {})
    specs = {each.hash: each for row in formats_of(INT8)[0] for each in (row.plain, row.spec)}
    prepare((library("portable", spec), [("append", "bf16"), ("decode", "multi")]) for spec in specs.values())
    made = formats.measure_formats(
        INT8, free([2], 40, 3), SMALL, lambda *said: None, lambda spec: library("portable", spec)
    )
    found = list(made)
    assert [case.case for case in found] == [f"decode-2x40-q3: {name}" for name in ("int8", "int4", "e4m3")]
    for case in found:
        plain, coded = case.rows
        assert plain.status == coded.status == OK and not case.left_out
        told = dict(zip(FORMAT_COLUMNS, format_row(case), strict=True))
        assert told["of bf16's"] == f"{coded.nbytes / plain.nbytes:.2f}" and coded.nbytes < 0.6 * plain.nbytes
