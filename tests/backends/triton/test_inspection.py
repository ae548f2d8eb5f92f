"""Registers, spills and loops of compiled kernels, checked against the vendors' own tools."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgen.backends.triton.amdgcn import hsaco_facts
from kvgen.backends.triton.compile import compile_one
from kvgen.backends.triton.elf import cubin_facts
from kvgen.backends.triton.inspection import Resources, inspect_kernel
from kvgen.backends.triton.loops import instr_per_token
from kvgen.backends.triton.sass import find_disassembler
from kvgen.backends.triton.source import TritonSource
from kvgen.backends.triton.store import CompiledKernel
from kvgen.errors import ToolchainError

Compile = Callable[[TritonSource, str], CompiledKernel]
NVIDIA = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize("target", NVIDIA)
def test_nvidia_kernel(paged: TritonSource, target: str, compiled: Compile) -> None:
    found = inspect_kernel(compiled(paged, target))
    assert 64 <= found.registers <= 255
    assert not found.spills
    assert found.shared_bytes == compiled(paged, target).metadata.shared
    (loop,) = found.loops
    assert loop == found.main_loop
    assert loop.innermost
    # a tile of K and one of V: 2 x 64 tokens x 256 bytes over 128 threads in 16-byte copies
    assert loop.global_loads["LDGSTS.128"] == 16
    assert set(loop.global_loads) == {"LDGSTS.128", "LDGSTS.32"}
    assert loop.narrow_loads == {}
    assert loop.async_copies == sum(loop.global_loads.values())
    # S = 16 x 64 x 128 and O = 16 x 128 x 64 in steps of 16 x 8 x 16, over 4 warps
    assert loop.mma == {"HMMA": 32}
    assert loop.mufu > 0
    assert (loop.local_loads, loop.local_stores) == (0, 0)
    assert 15 < instr_per_token(loop, warps=4, tokens=64) < 40
    assert loop.instructions < found.instructions
    # eight arguments and the two scratch pointers of Triton
    assert [p.size for p in found.parameters] == [8, 8, 8, 8, 8, 4, 8, 4, 8, 8]
    assert Resources.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_amd_kernel(paged: TritonSource, compiled: Compile) -> None:
    kernel = compiled(paged, "gfx942")
    found = inspect_kernel(kernel)
    for field, name in {
        "registers": "vgpr_count",
        "accumulators": "agpr_count",
        "scalar_registers": "sgpr_count",
        "spill_bytes": "private_segment_fixed_size",
    }.items():
        said = re.search(rf"\.{name}:\s+(\d+)", kernel.assembly)
        assert said is not None
        assert getattr(found, field) == int(said[1])
    assert found.registers > 0
    assert not found.spills
    assert found.main_loop is not None
    assert found.main_loop.global_loads["global_load_dwordx4"] == 8
    assert found.main_loop.narrow_loads == {}
    assert sum(found.main_loop.mma.values()) > 0
    assert len(found.parameters) == 10
    assert Resources.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_spills_are_reported_in_the_loop_and_in_all(
    spilling: TritonSource, target: str, compiled: Compile
) -> None:
    kernel = compiled(spilling, target)
    found = inspect_kernel(kernel)
    assert found.spills
    assert found.registers <= 32
    assert found.main_loop is not None
    assert found.main_loop.local_loads > 0
    assert found.main_loop.local_stores > 0
    command = [str(find_disassembler()), "-res-usage", str(kernel.binary_path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"REG:{found.registers} STACK:{found.spill_bytes} " in listing


PEELED = """
import triton
import triton.language as tl


@triton.jit
def tile(x, rows, page, left, acc, MASK: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    k = rows.load([page * T, 0])
    s = tl.dot(x, tl.trans(k))
    if MASK:
        s = tl.where((tl.arange(0, T) < left)[None, :], s, 0.0)
    return tl.dot(s.to(k.dtype), k, acc)


@triton.jit
def peeled(out, x_ptr, k_ptr, table, n, pages, T: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + at)
    rows = tl.make_tensor_descriptor(k_ptr, [pages * T, D], [D, 1], [T, D])
    acc = tl.zeros([16, D], tl.float32)
    for i in range(0, n // T):
        acc = tile(x, rows, tl.load(table + i), T, acc, False, T, D)
    for i in range(n // T, tl.cdiv(n, T)):
        acc = tile(x, rows, tl.load(table + i), n - i * T, acc, True, T, D)
    tl.store(out + at, acc)
"""


def test_tma_kernel_whose_last_tile_is_peeled(compiled: Compile) -> None:
    pointers = {"out": "*fp32", "x_ptr": "*bf16", "k_ptr": "*bf16", "table": "*i32"}
    source = TritonSource(
        PEELED,
        "peeled",
        {**pointers, "n": "i32", "pages": "i32", "T": "constexpr", "D": "constexpr"},
        {"T": 64, "D": 128},
        frozenset(pointers),
    )
    kernel = compiled(source, "sm_90")
    assert kernel.metadata.global_scratch_size > 0  # the descriptor is made on the device
    found = inspect_kernel(kernel)
    # the waits of TMA jump back from behind the exit: those are no loops
    full, masked = found.loops
    assert full.tma_loads == masked.tma_loads == 1
    assert full.async_copies == full.tma_loads + sum(full.global_loads.values())
    assert full.mma == masked.mma
    assert full.instructions < masked.instructions
    assert found.main_loop == full


def test_equal_code_has_one_fingerprint(paged: TritonSource, compiled: Compile) -> None:
    commented = dataclasses.replace(paged, text="# another comment\n" + paged.text)
    kernel, other = compiled(paged, "sm_90"), compiled(commented, "sm_90")
    assert kernel.key != other.key
    assert inspect_kernel(kernel).fingerprint == inspect_kernel(other).fingerprint
    unlike = dataclasses.replace(paged, num_warps=8)
    assert inspect_kernel(compiled(unlike, "sm_90")).fingerprint != inspect_kernel(kernel).fingerprint


def test_answer_is_kept_and_a_damaged_one_is_set_aside(
    trivial: Callable[[str], TritonSource], tmp_path: Path
) -> None:
    kernel = compile_one(trivial(""), "sm_80", cache_dir=tmp_path)
    found = inspect_kernel(kernel)
    assert found.main_loop is None
    kept = kernel.binary_path.with_suffix(".resources.json")
    kept.write_text(kept.read_text()[:50])
    assert inspect_kernel(kernel) == found
    assert kept.with_name(kept.name + ".bad").is_file()


def test_damaged_binaries_are_refused(paged: TritonSource, compiled: Compile) -> None:
    cubin, hsaco = compiled(paged, "sm_90").binary, compiled(paged, "gfx942").binary
    for size in (0, 10, 100, len(cubin) // 2):
        with pytest.raises(ToolchainError, match="damaged ELF"):
            cubin_facts(cubin[:size], "paged")
        with pytest.raises(ToolchainError, match="damaged ELF"):
            hsaco_facts(hsaco[:size], "paged")
    with pytest.raises(ToolchainError, match="no symbol other"):
        cubin_facts(cubin, "other")
    with pytest.raises(ToolchainError, match="no kernel other"):
        hsaco_facts(hsaco, "other")


def test_code_of_triton_36_is_read(paged: TritonSource, triton36: str, kernel_dir: Path) -> None:
    for target in ("sm_80", "sm_90", "gfx942"):
        found = inspect_kernel(compile_one(paged, target, cache_dir=kernel_dir, python=triton36))
        assert found.registers > 0
        assert not found.spills
        assert found.main_loop is not None
        assert sum(found.main_loop.mma.values()) >= 32
