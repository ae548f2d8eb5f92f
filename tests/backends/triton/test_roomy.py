"""A kernel with a stack although registers are left is compiled again with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgen.backends.triton import roomy
from kvgen.backends.triton.compile import CompileResult, Outcome
from kvgen.backends.triton.source import TritonSource


@dataclass
class Compiler:
    """Stands for compiler and binary: (registers, stack) of each kernel by name and limit."""

    facts: dict[tuple[str, int | None], tuple[int, int] | None]
    asked: list[tuple[str, int | None]]

    def compile_many(self, sources: Sequence[TritonSource], target: str, **options: Any) -> list[Any]:
        self.asked += [(source.kernel, source.maxnreg) for source in sources]
        return [self.result(source, target) for source in sources]

    def result(self, source: TritonSource, target: str) -> Any:
        found = self.facts[source.kernel, source.maxnreg]
        if found is None:
            return CompileResult(source, target, Outcome.CRASH, "it ended", 1.0, False, None)
        kernel: Any = SimpleNamespace(binary=found, metadata=SimpleNamespace(name=source.kernel))
        return CompileResult(source, target, Outcome.OK, "", 1.0, False, kernel)


def sources(*names: str) -> list[TritonSource]:
    return [TritonSource("text", name, {}) for name in names]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler({}, [])
    monkeypatch.setattr(roomy, "compile_many", found.compile_many)
    monkeypatch.setattr(
        roomy, "cubin_facts", lambda binary, name: SimpleNamespace(registers=binary[0], frame_bytes=binary[1])
    )
    return found


def test_only_what_has_a_stack_and_registers_left_is_compiled_again(compiler: Compiler) -> None:
    compiler.facts = {
        ("clean", None): (128, 0),
        ("thrifty", None): (168, 16),
        ("full", None): (255, 400),
        ("broken", None): None,
        ("thrifty", 255): (203, 0),
    }
    given = sources("clean", "thrifty", "full", "broken")
    results = roomy.compile_roomy(given, "sm_80", cache_dir=Path("nowhere"))
    assert compiler.asked[4:] == [("thrifty", 255)]
    limits = [result.source.maxnreg for result in results]
    assert limits == [None, 255, None, None]
    assert results[1].kernel is not None and results[1].kernel.binary == (203, 0)
    assert [result.seconds for result in results] == [1, 2, 1, 1], "both compiles took their time"


@pytest.mark.parametrize("second", [(255, 8), None])
def test_a_second_compile_that_helps_nothing_is_dropped(compiler: Compiler, second: Any) -> None:
    compiler.facts = {("a", None): (168, 16), ("a", 255): second}
    (result,) = roomy.compile_roomy(sources("a"), "sm_90", cache_dir=Path("nowhere"))
    assert result.source.maxnreg is None and result.kernel is not None


def test_amd_and_sources_with_a_limit_of_their_own_are_left_alone(compiler: Compiler) -> None:
    compiler.facts = {("a", None): (168, 16), ("a", 96): (96, 64)}
    roomy.compile_roomy(sources("a"), "gfx942", cache_dir=Path("nowhere"))
    roomy.compile_roomy([replace(sources("a")[0], maxnreg=96)], "sm_90", cache_dir=Path("nowhere"))
    assert compiler.asked == [("a", None), ("a", 96)]


@pytest.mark.parametrize(("warps", "limit"), [(1, 255), (8, 255), (16, 128), (32, 64)])
def test_a_limit_leaves_a_block_that_can_be_launched(compiler: Compiler, warps: int, limit: int) -> None:
    compiler.facts = {("a", None): (limit - 8, 16), ("a", limit): (limit, 0)}
    source = replace(sources("a")[0], num_warps=warps)
    (result,) = roomy.compile_roomy([source], "sm_90", cache_dir=Path("nowhere"))
    assert result.source.maxnreg == limit and limit * warps * 32 <= roomy.REGISTER_FILE


def test_a_kernel_that_has_all_its_blocks_may_have_is_left_alone(compiler: Compiler) -> None:
    compiler.facts = {("a", None): (128, 16)}
    source = replace(sources("a")[0], num_warps=16)
    roomy.compile_roomy([source], "sm_90", cache_dir=Path("nowhere"))
    assert compiler.asked == [("a", None)]
