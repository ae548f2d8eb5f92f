"""Who runs a test: the oracle, every row of the CPU backend, and the Triton templates in the interpreter.

One library for each (engine, spec, schedule), compiled in two bundles: one for ops whose bytes are exact,
one for attention and merge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from kvgen.backends.cpu.backend import EXACT_OPS, CpuBackend
from kvgen.backends.protocol import Kernel
from kvgen.builder import assemble
from kvgen.ir import Spec, Target
from kvgen.library import Library
from kvgen.resolve import resolve_target
from tests.support.bundle import prepare
from tests.support.oracle import OracleLibrary

CPU_ROWS = ("avx512-bf16", "avx512", "avx2", "portable")
"""Rows of the CPU backend. ``avx512-bf16`` multiplies pairs of bf16; ``avx512`` is the same CPU without."""

ENGINES = ("oracle", "avx512-bf16", "avx2", "portable", "interpret")
"""Who runs every line of the conformance list; the base grid and the tests of bits add ``avx512``."""


def engine_params(names: tuple[str, ...] = ENGINES) -> list[Any]:
    """``pytest.param`` for each engine, skipped where the CPU lacks the row."""
    marks = {name: [pytest.mark.isa(name.split("-")[0])] for name in CPU_ROWS}
    marks["avx512-bf16"].append(pytest.mark.isa("bf16"))
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def cpu_target(row: str) -> Target:
    """The target of a row of ``CPU_ROWS``, with no more features than the row's name says."""
    name, *features = row.split("-")
    return dataclasses.replace(resolve_target(f"cpu-{name}"), features=tuple(features))


class BundledLibrary(Library):
    """A library whose kernels compile together with those that a test is likely to want next."""

    def kernel(self, op: str, variant: str = "") -> Kernel:
        plan = self._plan(op, variant)
        if (op, plan.variant) not in self._kernels:
            types = sorted({"f32", self.spec.attention.q_dtype, plan.variant} & {"f32", "bf16", "f16"})
            exact = [("copy", ""), *((name, dtype) for name in ("append", "gather") for dtype in types)]
            attend = [("decode", "single"), ("decode", "multi"), ("prefill", "")]
            wanted = exact if op in EXACT_OPS else [*attend, *(("merge", t) for t in types)]
            # A cascade's prefix has a kernel of its own, which few tests want.
            prepare([(self, wanted if (op, plan.variant) in wanted else [(op, plan.variant)])])
        return self._kernels[op, plan.variant]


QUICK = "-Og"
"""How attention is compiled for tests, in 40% of the time that -O1 takes. What is shipped (-O3) is tested by
builds, by the slow 3-wise arrays, and by ``kvgen verify``."""


def cpu_library(spec: Spec, row: str, schedule: Mapping[str, Any] | None = None, **options: Any) -> Library:
    """An uncompiled library for a row; ``options`` go to ``CpuBackend``."""
    target = cpu_target(row)
    backend = CpuBackend(**{"opt": QUICK, **options})
    found = assemble(spec, target.name, schedule=schedule, backend=backend)
    return BundledLibrary(spec, found.record, target, backend, found.schedules)


_libraries: dict[tuple[Any, ...], Any] = {}


def library(engine: str, spec: Spec, schedule: Mapping[str, Any] | None = None) -> Any:
    """The library of ``engine`` for ``spec``. ``schedule`` pins knobs; the oracle has none."""
    key = (engine, spec.hash, repr(schedule))
    if key not in _libraries:
        if engine == "oracle":
            _libraries[key] = OracleLibrary(spec)
        elif engine == "interpret":
            _libraries[key] = assemble(spec, "interpret", schedule=schedule)
        else:
            _libraries[key] = cpu_library(spec, engine, schedule)
    return _libraries[key]
