"""The base grid: a covering array of specs, batches and rows, every op against the oracle, in hostile memory.

Kernels of many specs compile in one translation unit, so a test is a group of cases of one row; it runs them
all and reports every fault by the name of its spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.bundle import prepare
from tests.support.cases import Case, check_case, wanted_kernels
from tests.support.engines import CPU_ROWS, QUICK, cpu_library, engine_params, library
from tests.support.guard import run_guarded
from tests.support.specs import FACTORS, covering, make_spec

SIZE = 12
"""Specs of one translation unit."""

CPU = {
    **FACTORS,
    "align": (1, 64),
    "batch": (1, 3, 12, 17),
    "input": ("f32", "bf16", "f16"),
    "where": ("end", "begin"),
    "row": CPU_ROWS,
}
"""Factors of the array on the CPU: those of a spec, and those of the batch."""

INTERPRETED = {
    **FACTORS,
    "page_size": (1, 5, 16, 64),
    "kv_heads": (1, 2),
    "group": (1, 3, 4, 8),
    "head_dim": (32, 64, 72, 80, 96),
    "batch": (1, 2),
    "input": ("f32", "bf16", "f16"),
}
"""Small shapes: a program instance takes 20 to 35 ms in the interpreter."""

CASE_KEYS = ("batch", "input", "where")


def cases(factors: dict[str, Any], strength: int = 2, **options: Any) -> list[tuple[str, Case]]:
    """(row, case) for each line of the covering array; the seed of a case is its position."""
    found = []
    for seed, line in enumerate(covering(factors, 0, strength)):
        row = line.pop("row", "")
        given = {key: line.pop(key) for key in CASE_KEYS if key in line}
        found.append((row, Case(make_spec(**line), seed=seed, **given, **options)))
    return found


def groups(all_cases: list[tuple[str, Case]], size: int) -> Iterator[tuple[str, int]]:
    """(row, first) of the groups of each row."""
    for row in CPU_ROWS:
        count = sum(1 for r, _ in all_cases if r == row)
        yield from ((row, first) for first in range(0, count, size))


def check_group(all_cases: list[tuple[str, Case]], row: str, first: int, opt: str = QUICK) -> None:
    """Compile one group together, run each of its cases in a guarded child, report all that is wrong."""
    members = [case for r, case in all_cases if r == row][first : first + SIZE]
    libraries = [cpu_library(case.spec, row, opt=opt) for case in members]
    prepare((lib, wanted_kernels(case)) for lib, case in zip(libraries, members, strict=True))
    wrong = []
    for lib, case in zip(libraries, members, strict=True):
        run = run_guarded(lambda lib=lib, case=case: check_case(lib, case), timeout_s=120)
        found = run.value if run.ok else [f"died by {run.signal}: touched forbidden memory", run.error]
        where = f"{case.spec.name}, align {case.spec.cache.align}, seed {case.seed}"
        wrong += [f"{where}: {text}" for text in found if text]
    assert not wrong, f"{len(wrong)} faults:\n" + "\n".join(wrong)


PAIRS = cases(CPU)
SMALL = cases(INTERPRETED, most=97, most_q=17, budget=2e6)


@pytest.mark.parametrize(
    ("row", "first"),
    [
        pytest.param(row, first, marks=param.marks)
        for param in engine_params(CPU_ROWS)
        for row, first in groups(PAIRS, SIZE)
        if row == param.values[0]
    ],
)
def test_pairs_on_the_cpu(row: str, first: int) -> None:
    check_group(PAIRS, row, first)


@pytest.mark.parametrize("at", range(len(SMALL)), ids=[case.spec.name for _, case in SMALL])
def test_pairs_in_the_interpreter(at: int) -> None:
    _, case = SMALL[at]
    wrong = check_case(library("interpret", case.spec), case)
    assert not wrong, "\n".join(wrong)


@pytest.mark.hours
@pytest.mark.parametrize("part", range(40))
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_triples_on_the_cpu(row: str, part: int) -> None:
    """Every combination of values of any three factors: hours of specs, cut into 160 tests."""
    found = cases(CPU, strength=3)
    for first in [first for r, first in groups(found, SIZE) if r == row][part::40]:
        check_group(found, row, first, "-O3")
