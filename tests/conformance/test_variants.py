"""Masks, scores, sinks, rope and a V inside K in every combination of two, on every CPU row and interpreted.

As in ``test_base_grid``: a covering array of specs, each op against the oracle, in hostile memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bundle import prepare
from tests.support.engines import CPU_ROWS, QUICK, cpu_library, engine_params, library
from tests.support.guard import run_guarded
from tests.support.specs import covering
from tests.support.variants import (
    MASKS,
    ROPES,
    SCORES,
    VariantCase,
    check_variant,
    variant_spec,
    wanted_kernels,
)

SIZE = 20
"""Specs of one translation unit."""
CPU: dict[str, tuple[Any, ...]] = {
    "mask": MASKS,
    "score": SCORES,
    "sink": (False, True),
    "rope": tuple(ROPES),
    "alias": (False, True),
    "storage": (
        ("bf16", "bf16", "bf16"),
        ("f16", "f32", "f32"),
        ("int8-token", "int8-block", "bf16"),
        ("e4m3-token", "bf16", "f16"),
        ("int4-block", "int8-token", "f32"),
    ),
    "layout": ("hnd", "nhd", "two-pools-hnd", "packed-k", "pairs"),
    "heads": ((1, 8, 64), (2, 3, 72), (4, 1, 32), (1, 5, 80)),
    "page_size": (1, 5, 16),
    "where": ("end", "begin"),
    "row": CPU_ROWS,
}
"""``storage`` is (K, V, query); ``heads`` is (KV heads, group, head_dim)."""


def cases(
    factors: dict[str, tuple[Any, ...]], strength: int = 2, **options: Any
) -> list[tuple[str, VariantCase]]:
    """(row, case) for each line of the covering array; the seed of a case is its position."""
    return [_case(line, seed, options) for seed, line in enumerate(covering(factors, 0, strength))]


def _case(line: dict[str, Any], seed: int, options: dict[str, Any]) -> tuple[str, VariantCase]:
    line = dict(line)
    row, where = line.pop("row", ""), line.pop("where")
    k, v, q = line.pop("storage")
    if line["alias"] and k.startswith("int4"):
        k = "int8-block"  # two codes of a byte come from both ends of a row: no part of it can be V
    kv_heads, group, head_dim = line.pop("heads")
    shape = {"format_k": k, "format_v": v, "q_dtype": q, "kv_heads": kv_heads, "group": group}
    spec = variant_spec(**line, **shape, head_dim=head_dim)
    return row, VariantCase(spec, seed, where, **options)


PAIRS = cases(CPU)
INTERPRETED = [
    _case(
        {
            "mask": mask,
            "score": SCORES[seed % len(SCORES)],
            "sink": seed % 2 == 0,
            "rope": ("no rope", "half", "pre interleaved", "pre half")[seed % 4],
            "alias": seed % 3 == 0 and seed % 4 < 2,  # Triton turns no keys that hold V as well
            "storage": CPU["storage"][seed % 3],
            "layout": ("hnd", "nhd")[seed % 2],
            "heads": ((1, 2, 32), (1, 3, 40))[seed // 2 % 2],
            "page_size": (5, 16)[seed // 3 % 2],
            "where": "end",
        },
        seed,
        {"most": 40, "most_q": 9, "batch": 2},
    )[1]
    for seed, mask in enumerate(MASKS)
]
"""Each mask once, among all else: a program instance takes 20 to 35 ms in the interpreter."""


def check_group(members: list[VariantCase], row: str, opt: str = QUICK) -> None:
    """Compile the kernels of some cases together, run each in a guarded child, report all that is wrong."""
    libraries = [cpu_library(case.spec, row, opt=opt) for case in members]
    prepare((lib, wanted_kernels(case)) for lib, case in zip(libraries, members, strict=True))
    wrong = []
    for lib, case in zip(libraries, members, strict=True):
        run = run_guarded(lambda lib=lib, case=case: check_variant(lib, case), timeout_s=120)
        found = run.value if run.ok else [f"died by {run.signal}: touched forbidden memory", run.error]
        wrong += [f"{case.spec.name}, seed {case.seed}: {text}" for text in found if text]
    assert not wrong, f"{len(wrong)} faults:\n" + "\n".join(wrong)


def groups(row: str, found: list[tuple[str, VariantCase]]) -> list[list[VariantCase]]:
    members = [case for r, case in found if r == row]
    return [members[first : first + SIZE] for first in range(0, len(members), SIZE)]


@pytest.mark.parametrize(
    ("row", "at"),
    [
        pytest.param(row.values[0], at, marks=row.marks)
        for row in engine_params(CPU_ROWS)
        for at in range(len(groups(row.values[0], PAIRS)))
    ],
)
def test_pairs_of_variants_on_the_cpu(row: str, at: int) -> None:
    check_group(groups(row, PAIRS)[at], row)


@pytest.mark.parametrize("at", range(len(INTERPRETED)), ids=[case.spec.name for case in INTERPRETED])
def test_variants_in_the_interpreter(at: int) -> None:
    case = INTERPRETED[at]
    wrong = check_variant(library("interpret", case.spec), case)
    assert not wrong, "\n".join(wrong)


@pytest.mark.hours
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_triples_of_variants_on_the_cpu(row: str, part: int) -> None:
    for members in groups(row, cases(CPU, strength=3))[part::10]:
        check_group(members, row, "-O3")
