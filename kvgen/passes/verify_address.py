"""The verifiers of address and simplify (a proof by exhaustion) and of render (what a source must not have).

An address is a sum of terms that each depend on one dimension, so checking every index of every
dimension by itself proves the whole of it.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from kvgen.ir import Plane
from kvgen.ir.plan import KernelPlan
from kvgen.ir.verify import VerifyError
from kvgen.passes.address import PAGE_IDS, Address
from kvgen.passes.integers import evaluate

Steps = dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]
"""Coefficient of each run-time stride (or of 1, under the name '') for every index of a dimension."""


def verify_address(plane: Plane, found: Address) -> None:
    """Prove that ``found`` is the plane's placement, and that every 32-bit term stays below 2**31.

    Raises ``VerifyError`` naming plane, dimension and index.
    """
    for dim, size in {**plane.index_sizes(), "page": 3}.items():
        index = np.arange(size, dtype=np.int64)
        if dim == "page":
            index[-1] = PAGE_IDS.high
        want, got = _placed(plane, dim, index), _addressed(found, dim, index)
        for name in {*want, *got}:
            zero = np.zeros_like(index)
            wrong = np.flatnonzero(want.get(name, zero) != got.get(name, zero))
            if wrong.size:
                at = int(index[wrong[0]])
                raise VerifyError(f"{plane.name}: address of {dim} = {at} differs from its placement")
        for term in found.of(dim):
            reach = int(np.max(evaluate(term.index, {dim: index}))) * (term.stride or 1)
            if not term.wide and (term.stride is None or reach >= 2**31):
                raise VerifyError(
                    f"{plane.name}: {term.index} * {term.stride_name} reaches {reach} in 32 bits"
                )


def _placed(plane: Plane, dim: str, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Steps:
    """Steps of the placement itself, axis by axis."""
    steps: Steps = {}
    for placed in plane.axes:
        if placed.axis.dim != dim:
            continue
        along = np.array([placed.axis.index(int(i)) for i in index], dtype=np.int64)
        name = "" if placed.constant else f"{plane.name}_stride_{placed.axis.key}"
        along *= placed.stride.fixed // plane.itemsize if placed.constant else 1
        steps[name] = steps.get(name, np.zeros_like(along)) + along
    return steps


def _addressed(found: Address, dim: str, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Steps:
    """Steps of the symbolic address."""
    steps: Steps = {}
    for term in found.of(dim):
        along = np.asarray(evaluate(term.index, {dim: index}), dtype=np.int64) + np.zeros_like(index)
        name = term.stride_name if term.stride is None else ""
        along = along * (1 if term.stride is None else term.stride)
        steps[name] = steps.get(name, np.zeros_like(along)) + along
    return steps


LEFTOVER = re.compile(r"\{\{|\{%|%\}|\bNone\b(?!:)|Undefined|namespace\(")
"""What a template would leave in C++ that it had not filled in."""


def verify_source(plan: KernelPlan, source: str) -> None:
    """Prove what a reader may expect of a rendered kernel; ``VerifyError`` quotes the line.

    No leftovers of the template language, nothing but ASCII, the spec's hash and the schedule in the
    header, and no constant that the kernel does not use.
    """
    head = source[:2000]
    if plan.spec.hash8 not in head or any(knob not in head for knob in plan.stated):
        raise VerifyError(f"{plan.template}: the header does not name the spec's hash and the schedule")
    for number, line in enumerate(source.splitlines(), 1):
        if plan.target.backend == "cpu" and LEFTOVER.search(line):
            raise VerifyError(f"{plan.template}, line {number}: a leftover of the template: {line.strip()}")
        if not line.isascii():
            raise VerifyError(f"{plan.template}, line {number}: not ASCII: {line.strip()}")
    words = Counter(re.findall(r"\w+", source))
    for constant in plan.constants:
        if words[constant.name] < 2:
            raise VerifyError(f"{plan.template}: constant {constant.name} is declared and never used")
