"""Every codec in every combination of two: with scale types, groups, places of scales and transforms; and
beside raw rows, layouts, masks, scores and heads, on every CPU row and interpreted.

As in ``test_base_grid``: each op against the oracle, in hostile memory. Written bytes are the oracle's.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kvgen.ir.codec import CODECS
from kvgen.ir.quant import SCALE_DTYPES, SCALE_PLACES
from tests.support.bundle import prepare
from tests.support.codecs import ATTENTION, CPU_ROWS, cases, sides
from tests.support.engines import QUICK, cpu_library, engine_params, library
from tests.support.guard import run_guarded
from tests.support.variants import VariantCase, check_variant, wanted_kernels

SIZE = 12
"""Specs of one translation unit."""
PAIRS = list(cases(2, only=28, most=120, most_q=20, batch=3))
"""Two of three storages of the covering array; all of them run under ``slow``."""
SMALL: dict[str, tuple[Any, ...]] = {
    "layout": ("hnd", "nhd"),
    "heads": ((1, 2, 32), (1, 3, 64)),
    "terms": ({}, {"window": 5}),
    "raw": ({}, {"keep_first": 3, "keep_last": 4}),
    "page_size": (16,),
    "q_dtype": ("bf16", "f32"),
}
INTERPRETED = [case for _, case in cases(2, SMALL, 10, most=40, most_q=5, batch=2)]
"""A program instance takes 20 to 35 ms in the interpreter."""


def kernels(case: VariantCase) -> list[tuple[str, str]]:
    """The (op, variant) pairs that a check launches."""
    return [*wanted_kernels(case), ("gather", "f32")]


def check_group(members: list[VariantCase], row: str, opt: str = QUICK) -> None:
    """Compile the kernels of some cases together, run each in a guarded child, report all that is wrong."""
    libraries = [cpu_library(case.spec, row, opt=opt) for case in members]
    prepare((lib, kernels(case)) for lib, case in zip(libraries, members, strict=True))
    wrong = []
    for lib, case in zip(libraries, members, strict=True):
        check = functools.partial(check_variant, lib, case, gather=True)
        run = run_guarded(check, timeout_s=120)
        found = run.value if run.ok else [f"died by {run.signal}: touched forbidden memory", run.error]
        wrong += [f"{case.spec.name}, seed {case.seed}: {text}" for text in found if text]
    assert not wrong, f"{len(wrong)} faults:\n" + "\n".join(wrong)


def groups(row: str, found: list[tuple[str, VariantCase]]) -> list[list[VariantCase]]:
    members = [case for r, case in found if r == row]
    return [members[first : first + SIZE] for first in range(0, len(members), SIZE)]


def test_every_codec_meets_every_scale_type_and_place() -> None:
    """What was taken back because a codec cannot have it has not taken back all there was."""
    found = sides()
    assert {table["format"] for table in found} == set(CODECS)
    scaled = [table for table in found if "group" in table]
    assert {table.get("scale_dtype", "f32") for table in scaled} == set(SCALE_DTYPES)
    assert {table.get("scales", "page") for table in scaled} == set(SCALE_PLACES)
    for name, codec in CODECS.items():
        if codec.scaled and not codec.keys:
            own = [table for table in scaled if table["format"] == name]
            blocks = {tuple(sorted(table["group"].items())) for table in own}
            assert len(blocks) >= 3 and any("transform" in table for table in own), name


@pytest.mark.parametrize(
    ("row", "at"),
    [
        pytest.param(row.values[0], at, marks=row.marks)
        for row in engine_params(CPU_ROWS)
        for at in range(len(groups(row.values[0], PAIRS)))
    ],
)
def test_pairs_of_codecs_on_the_cpu(row: str, at: int) -> None:
    check_group(groups(row, PAIRS)[at], row)


@pytest.mark.parametrize("at", range(len(INTERPRETED)), ids=[case.spec.name for case in INTERPRETED])
def test_codecs_in_the_interpreter(at: int) -> None:
    case = INTERPRETED[at]
    wrong = check_variant(library("interpret", case.spec), case, gather=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_all_pairs_of_codecs_on_the_cpu(row: str) -> None:
    for members in groups(row, list(cases(most=150, most_q=20))):
        check_group(members, row)


@pytest.mark.hours
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_triples_of_codecs_on_the_cpu(row: str, part: int) -> None:
    for members in groups(row, list(cases(3, ATTENTION, most=150, most_q=20)))[part::8]:
        check_group(members, row, "-O3")
