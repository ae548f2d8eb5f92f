"""One hand-written paged attention kernel, and where its compiled forms are kept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgen.backends.triton.compile import compile_one
from kvgen.backends.triton.interpret import InterpreterClient
from kvgen.backends.triton.source import TritonSource
from kvgen.backends.triton.store import CompiledKernel

TEXT = """
import triton
import triton.language as tl


@triton.jit
def paged(out_ptr, q_ptr, k_ptr, v_ptr, table_ptr, kv_len, page_stride, scale,
          PAGE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
          UPCAST: tl.constexpr):
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    tok = tl.arange(0, TILE)
    q = tl.load(q_ptr + row[:, None] * D + d[None, :])
    if UPCAST:
        q = q.to(tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, kv_len, TILE):
        t = start + tok
        page = tl.load(table_ptr + t // PAGE, mask=t < kv_len, other=0).to(tl.int64)
        offset = page[:, None] * page_stride + (t % PAGE)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + offset, mask=(t < kv_len)[:, None], other=0.0)
        v = tl.load(v_ptr + offset, mask=(t < kv_len)[:, None], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where((t < kv_len)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m = m_new
    tl.store(out_ptr + row[:, None] * D + d[None, :], (acc / l[:, None]).to(out_ptr.dtype.element_ty))
"""

PAGED = TritonSource(
    text=TEXT,
    kernel="paged",
    signature={
        "out_ptr": "*bf16", "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "table_ptr": "*i32",
        "kv_len": "i32", "page_stride": "i64", "scale": "fp32",
        "PAGE": "constexpr", "D": "constexpr", "ROWS": "constexpr", "TILE": "constexpr",
        "UPCAST": "constexpr",
    },
    constants={"PAGE": 16, "D": 128, "ROWS": 16, "TILE": 64, "UPCAST": False},
    aligned=frozenset({"out_ptr", "q_ptr", "k_ptr", "v_ptr", "table_ptr", "page_stride"}),
)  # fmt: skip


@pytest.fixture(scope="session")
def paged() -> TritonSource:
    """bf16 attention over a block table: 16 query rows, pages of 16 tokens, tiles of 64."""
    return PAGED


@pytest.fixture(scope="session")
def spilling() -> TritonSource:
    """The same with a limit of registers that makes the loop spill."""
    return dataclasses.replace(PAGED, maxnreg=32)


@pytest.fixture(scope="session")
def trivial() -> Callable[[str], TritonSource]:
    """A kernel that does nothing, after the given module body has run."""

    def make(body: str = "") -> TritonSource:
        text = (
            f"import triton\nimport triton.language as tl\n{body}\n\n@triton.jit\ndef nothing(p):\n    pass\n"
        )
        return TritonSource(text, "nothing", {"p": "*fp32"})

    return make


@pytest.fixture(scope="session")
def kernel_dir() -> Path:
    """Where the session's compiled kernels lie; kept between runs with KVGEN_TEST_CACHE_DIR."""
    return Path(os.environ["KVGEN_CACHE_DIR"]) / "triton-tests"


@pytest.fixture(scope="session")
def compiled(kernel_dir: Path) -> Callable[[TritonSource, str], CompiledKernel]:
    """Compile a source for a target, once a session."""

    def compile_(source: TritonSource, target: str) -> CompiledKernel:
        return compile_one(source, target, cache_dir=kernel_dir)

    return compile_


@pytest.fixture(scope="session")
def triton36() -> str:
    """An interpreter that has triton 3.6."""
    python = os.environ.get("KVGEN_TRITON36_PYTHON")
    if not python:
        pytest.skip("KVGEN_TRITON36_PYTHON names no interpreter that has triton 3.6 (and numpy)")
    return python


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterClient]:
    """One interpreter process for a module's tests."""
    with InterpreterClient(timeout_s=120) as client:
        yield client
