"""Rendered sources and the machine code they become: readable, without spills or narrow loads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvgen.backends.triton.backend import TritonBackend
from kvgen.ir.plan import OPS
from tests.support.specs import make_spec
from tests.support.triton_calls import BACKEND, kernel, plan


@pytest.mark.parametrize("op", OPS)
def test_every_op_compiles_for_amd(op: str) -> None:
    spec = make_spec("int8-token", "bf16", group=4, head_dim=64, q_dtype="bf16")
    for name, facts in kernel(op, spec, "gfx942").resources().items():
        assert facts["spill_bytes"] == 0, name


@pytest.mark.parametrize("op", OPS)
def test_every_op_compiles_with_the_oldest_triton(op: str, triton36: str) -> None:
    spec = make_spec("int8-token", "int8-token", group=4, head_dim=72, q_dtype="bf16", mask=(True, 30))
    TritonBackend(python=triton36).compile([plan(op, spec, "sm_80")])


@pytest.mark.parametrize("op", OPS)
def test_a_source_for_a_gpu_holds_no_trace_of_the_interpreter(op: str, tmp_path: Path) -> None:
    text = BACKEND.render(plan(op, make_spec("bf16", "bf16", q_dtype="bf16"), "sm_90"))
    ast.parse(text)
    assert "interpret" not in text and "to_bf16" not in text and "{{" not in text


def test_the_same_plan_renders_the_same_text() -> None:
    spec = make_spec("int8-token", "int8-token", q_dtype="bf16")
    first, second = (BACKEND.render(plan("decode", spec, "sm_90")) for _ in range(2))
    assert first == second
