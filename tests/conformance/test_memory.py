"""Memory: addresses beyond 2**31 elements, strided arguments, and all ops under the sanitizers."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from kvgen.backends.cpu import isa
from kvgen.backends.cpu.compiler import find_compiler, sanitizer_libraries
from kvgen.errors import ToolchainError
from kvgen.library import Library
from tests.support.bundle import compile_only, prepare
from tests.support.cases import Case, check_case, wanted_kernels
from tests.support.compare import assert_attention
from tests.support.engines import CPU_ROWS, ENGINES, cpu_library, engine_params, library
from tests.support.guard import run_guarded
from tests.support.oracle import OracleLibrary
from tests.support.sanitize import run_sanitized
from tests.support.specs import make_spec
from tests.support.world import Where, World

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
FAR = 2**31 + 4096
"""Elements from one page to the next: no 32-bit product reaches page 1."""


@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
@pytest.mark.parametrize("name", ["bf16", "int8-token"])
def test_pages_farther_apart_than_an_int32_counts(row: str, name: str) -> None:
    """Reserved, not used: only the two pages touched cost memory."""
    spec = make_spec(name, name, layout="two-pools-nhd", page_size=8, kv_heads=2, group=2)
    lib = library(row, spec)
    planes = {}
    for plane in lib.record.planes:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        span = (FAR * 2 + 8192) * plane.itemsize
        flat = torch.from_numpy(np.frombuffer(mmap.mmap(-1, span, flags=flags), np.uint8))
        small = lib.new_cache(3).planes[plane.name]
        strides = (FAR, *small.stride()[1:])
        planes[plane.name] = flat.view(small.dtype).as_strided(small.shape, strides)
    far, near = lib.adopt(**planes), lib.new_cache(3)
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(15, 2, 64, generator=generator) for _ in "kv")
    q = torch.randn(1, 4, 64, generator=generator)
    slots = torch.cat([torch.arange(16, 24), torch.arange(8, 15)])
    table, lens = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([15], dtype=torch.int32)
    results = []
    for cache in (near, far):
        lib.append(cache, k, v, slots)
        lib.copy(cache, torch.tensor([2], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
        copied = torch.tensor([[0, 1]], dtype=torch.int32)
        results.append(
            [
                *lib.decode(q, cache, table, lens),
                *lib.prefill(q, cache, copied, lens, torch.tensor([0, 1], dtype=torch.int32)),
                *lib.gather(cache, copied, lens),
            ]
        )
    for near_result, far_result in zip(*results, strict=True):
        assert torch.equal(near_result, far_result)
    if name == "bf16":
        assert torch.equal(results[1][4], k.bfloat16().float())


PACKED_ROWS = (
    ("f32", 72, "f32"),
    ("bf16", 72, "bf16"),
    ("bf16", 80, "bf16"),
    ("bf16", 72, "f32"),
    ("f16", 72, "f16"),
    ("int8-tensor", 72, "f32"),
    ("int8-token", 72, "bf16"),
)
"""Format, head_dim and query type: every load with a tail that some row has."""


@pytest.mark.parametrize("where", ["end", "begin"])
@pytest.mark.parametrize("row", engine_params(CPU_ROWS))
def test_line_11_the_last_row_of_a_pool_is_not_read_past(row: str, where: Where) -> None:
    """Packed rows of 72 and 80 elements, pages of one token, all of them in use: K and V end at the guard."""
    specs = [
        make_spec(name, name, "two-pools-nhd", 1, 1, 2, head_dim, q_dtype=q_dtype, align=1)
        for name, head_dim, q_dtype in PACKED_ROWS
    ]
    cases = [Case(spec, seed=seed, where=where, spare=0, most=97) for seed, spec in enumerate(specs)]
    libraries = [cpu_library(case.spec, row) for case in cases]
    prepare((lib, wanted_kernels(case)) for lib, case in zip(libraries, cases, strict=True))
    for lib, case in zip(libraries, cases, strict=True):
        assert not run_guarded(lambda lib=lib, case=case: check_case(lib, case)).check(), case.spec.name


@pytest.mark.parametrize("engine", engine_params(ENGINES[1:]))
def test_line_15_strided_arguments(engine: str) -> None:
    """Rows of q, k, v, out, lse and of the table may lie anywhere; only the last dimension is contiguous."""
    spec = make_spec("f32", "f32", kv_heads=2, group=2)
    lib = library(engine, spec)
    world = World(lib, 8)
    lens = [40, 17]
    table, lens_B, starts = world.table(lens), world.ints(lens), world.ints([0, 3, 5])
    poison = float("nan")

    def strided(t: torch.Tensor) -> torch.Tensor:
        """The same numbers with heads outermost and NaN between the rows."""
        wide = torch.full((t.shape[1], t.shape[0] * 2, t.shape[2] + 16), poison, dtype=t.dtype)
        view = wide.transpose(0, 1)[::2, :, 16:]
        return view.copy_(t)

    k, v = (world.normal(57, 2, 64) for _ in "kv")
    slots = world.ints(world.slots(table, lens), torch.int64)
    lib.append(world.cache, strided(k), strided(v), slots)
    wide_table = torch.full((4, table.shape[1] + 3), 2**31 - 1, dtype=torch.int32)[::2, 3:]
    wide_table.copy_(table)
    q = world.query(5)
    want = OracleLibrary(spec).prefill(q, world.cache, table, lens_B, starts)
    for op in ("prefill", "decode"):
        out, lse = strided(torch.zeros(5, 4, 64)), torch.full((10, 6), poison)[::2, 2:]
        got = getattr(lib, op)(strided(q), world.cache, wide_table, lens_B, starts, out=out, lse=lse)
        assert got[0] is out and got[1] is lse
        assert_attention(got, want, "f32")
    rows = lib.gather(world.cache, wide_table, lens_B)
    assert torch.equal(rows[0].float(), k) and torch.equal(rows[1].float(), v)


SANITIZED = """
import sys
from tests.conformance.test_memory import sanitized
from tests.support.bundle import prepare
from tests.support.cases import check_case, wanted_kernels
wanted = sanitized(sys.argv[1:])
prepare((lib, wanted_kernels(case)) for lib, case in wanted)
for lib, case in wanted:
    print(lib.target.name, case.spec.name, check_case(lib, case), flush=True)
"""

SANITIZED_SPECS = [
    make_spec("bf16", "bf16", page_size=5, kv_heads=2, group=3, head_dim=72, q_dtype="bf16", align=1),
    make_spec("f16", "f32", "packed-k", 16, 1, 4, 80, (False, 33), "f16", 1),
    make_spec("int8-token", "int8-head", "transposed-v", 8, 2, 2, 40, (True, 0), "f32", 1),
]


def sanitized(rows: list[str]) -> list[tuple[Library, Case]]:
    """Small cases with packed rows and tails, in memory from malloc: red zones on both sides."""
    return [
        (
            cpu_library(spec, row, sanitize=True),
            Case(spec, batch=3, seed=i, most=54, most_q=17, budget=5e5, where="heap"),
        )
        for row in rows
        for i, spec in enumerate(SANITIZED_SPECS)
    ]


def test_all_ops_under_the_sanitizers() -> None:
    """The best row of this machine and the portable one. Masked loads are not seen: guard pages do that."""
    try:
        sanitizer_libraries(find_compiler())
    except ToolchainError as error:
        pytest.skip(f"needs the sanitizers' runtimes: {error}")
    rows = sorted({isa.best_row().name, "portable"})
    wanted = sanitized(rows)
    # Compiled here, because a compiler started under the sanitizer's runtime would run under it too.
    for row in rows:
        compile_only((lib, wanted_kernels(case)) for lib, case in wanted if lib.target.arch == row)
    for row in rows:
        printed = run_sanitized(SANITIZED, row, timeout_s=400).check()
        lines = printed.splitlines()
        assert len(lines) == len(SANITIZED_SPECS)
        assert all(line.endswith(" []") for line in lines), printed
