"""What a kernel is before it is compiled, and that its key tells every difference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvgen.backends.triton.arch import ARCH_NAMES, gpu_arch
from kvgen.backends.triton.source import TritonSource
from kvgen.errors import ArgumentError, UnsupportedError


def test_key_is_stable_and_tells_target_and_toolchain(paged: TritonSource) -> None:
    key = paged.key("sm_90", "triton-3.9.0")
    assert key == dataclasses.replace(paged).key("sm_90", "triton-3.9.0")
    assert len(key) == 64
    assert key != paged.key("sm_80", "triton-3.9.0")
    assert key != paged.key("sm_90", "triton-3.6.0")


@pytest.mark.parametrize(
    "change",
    [
        {"text": "import triton"},
        {"kernel": "other"},
        {"num_warps": 8},
        {"num_stages": 2},
        {"fp_fusion": False},
        {"maxnreg": 128},
        {"aligned": frozenset({"q_ptr"})},
        {"constants": {"PAGE": 16, "D": 128, "ROWS": 16, "TILE": 32, "UPCAST": False}},
        # equal to Python, not to a kernel: 0 and False have other types there
        {"constants": {"PAGE": 16, "D": 128, "ROWS": 16, "TILE": 64, "UPCAST": 0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_key_tells_every_field(paged: TritonSource, change: dict[str, Any]) -> None:
    assert dataclasses.replace(paged, **change).key("sm_90", "t") != paged.key("sm_90", "t")


def test_key_tells_the_order_of_arguments(paged: TritonSource) -> None:
    backwards = dict(reversed(list(paged.signature.items())))
    assert dataclasses.replace(paged, signature=backwards).key("sm_90", "t") != paged.key("sm_90", "t")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": {"p": "bfloat16"}, "constants": {}, "aligned": ()}, "not a Triton type"),
        ({"constants": {"PAGE": 16}}, r"missing \['D', 'ROWS', 'TILE', 'UPCAST'\]"),
        ({"aligned": frozenset({"PAGE"})}, "not run-time arguments"),
        ({"num_warps": 3}, "power of two"),
        ({"num_stages": 0}, "at least 1"),
    ],
    ids=["type", "constants", "aligned", "warps", "stages"],
)
def test_parts_that_do_not_fit_are_refused(paged: TritonSource, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        dataclasses.replace(paged, **change)


def test_launch_arguments_leave_constants_out(paged: TritonSource) -> None:
    assert [name for name, _ in paged.launch_arguments][-3:] == ["kv_len", "page_stride", "scale"]


def test_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"sm_80.*gfx942"):
        gpu_arch("sm_70")
    assert {gpu_arch(name).binary_suffix for name in ARCH_NAMES} == {"cubin", "hsaco"}
