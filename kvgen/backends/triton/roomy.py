"""Compile with all registers where the compiler kept some in memory although more were left.

ptxas likes 96, 128 or 168 registers a thread, so that more blocks fit beside each other, and puts a few
values of the code outside the loops on the stack to get there. Told how many a thread may have, it does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvgen.backends.triton.arch import gpu_arch
from kvgen.backends.triton.compile import CompileResult, Progress, compile_many
from kvgen.backends.triton.elf import cubin_facts
from kvgen.backends.triton.source import TritonSource

MOST_REGISTERS = 255
"""Registers that a thread of an NVIDIA GPU can have."""

REGISTER_FILE = 65536
"""Registers of a multiprocessor: a block whose threads ask for more together cannot be launched."""


def compile_roomy(
    sources: Sequence[TritonSource],
    target: str,
    *,
    cache_dir: Path,
    workers: int = 2,
    timeout_s: float = 300.0,
    python: str = sys.executable,
    progress: Progress | None = None,
) -> list[CompileResult]:
    """``compile_many``; a kernel with a stack and registers to spare is compiled again without that thrift.

    Where that empties the stack, the result's ``source`` says so by its ``maxnreg``: launch that one.
    """

    def compiled(some: Sequence[TritonSource], tell: Progress | None) -> list[CompileResult]:
        return compile_many(
            some, target, cache_dir=cache_dir, workers=workers, timeout_s=timeout_s, python=python,
            progress=tell,
        )  # fmt: skip

    results = compiled(sources, progress)
    if gpu_arch(target).backend != "cuda":
        return results
    cramped = [i for i, result in enumerate(results) if _stack(result) and _registers_left(result)]
    if cramped:
        again = compiled([replace(sources[i], maxnreg=_room(sources[i])) for i in cramped], None)
        for i, result in zip(cramped, again, strict=True):
            if result.kernel is not None and not _stack(result):
                results[i] = replace(result, seconds=results[i].seconds + result.seconds)
    return results


def _room(source: TritonSource) -> int:
    """Registers a thread may have where one block has the multiprocessor; ptxas hands them out by eights."""
    share = REGISTER_FILE // (source.num_warps * 32)
    return MOST_REGISTERS if share > MOST_REGISTERS else share // 8 * 8


def _stack(result: CompileResult) -> int:
    """Bytes of a thread's stack; 0 for what did not compile."""
    kernel = result.kernel
    return 0 if kernel is None else cubin_facts(kernel.binary, kernel.metadata.name).frame_bytes


def _registers_left(result: CompileResult) -> bool:
    kernel = result.kernel
    if kernel is None or result.source.maxnreg is not None:
        return False
    return cubin_facts(kernel.binary, kernel.metadata.name).registers < _room(result.source)
