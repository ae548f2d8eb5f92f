"""ALiBi, a window and a soft cap written as texts in a spec: the built-in ones' numbers and instructions."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.builder import assemble
from kvgen.ir import Spec
from tests.support.compare import assert_attention
from tests.support.triton_calls import attend as interpreted
from tests.support.triton_calls import kernel
from tests.variants.calls import attend, spec_with

LENS, FEW, MANY = (0, 1, 57, 130), (2, 3, 5, 8), (3, 2, 20, 37)
CALLS = (("decode", FEW), ("prefill", MANY))


@dataclass(frozen=True)
class Pair:
    """The same thing said twice."""

    key: dict[str, Any]
    text: dict[str, Any]

    def specs(self, **base: Any) -> tuple[Spec, Spec]:
        """The spec with the built-in key, and the one with the text."""
        return spec_with(base, **self.key), spec_with(base, **self.text)


def slopes(heads: int) -> np.ndarray[Any, Any]:
    """ALiBi's for a power of two of heads."""
    return np.exp2(-8.0 * np.arange(1, heads + 1) / heads).astype(np.float32)


PAIRS = {
    "window": Pair({"window": 40}, {"mask": "q_pos - kv_pos <= 40"}),
    "soft cap": Pair({"soft_cap": 20.0}, {"score": "20 * tanh(score / 20)"}),
    "alibi": Pair(
        {"alibi": True},
        {
            "score": "score - slope[head] * abs(q_pos - kv_pos)",
            "params": {"slope": {"dims": ["head"], "dtype": "f32"}},
        },
    ),
}


def given(spec: Spec) -> dict[str, Any]:
    return {p.name: slopes(spec.attention.q_heads) for p in spec.attention.params}


@pytest.mark.parametrize("name", ("window", "alibi"))
def test_numbers_on_the_cpu(name: str) -> None:
    """The soft cap's sources are the same; see below."""
    states = []
    for spec in PAIRS[name].specs():
        lib = assemble(spec, "cpu")
        states.append([attend(lib, op, LENS, q_lens, given(spec)) for op, q_lens in CALLS])
    for (built_in, want), (by_hand, other) in zip(*states, strict=True):
        assert_attention(built_in, want, "f32")
        assert_attention(by_hand, want, "f32")
        torch.testing.assert_close(other, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("op", "q_lens"), CALLS)
def test_numbers_in_the_interpreter(name: str, op: str, q_lens: tuple[int, ...] | None) -> None:
    (built_in, _), (by_hand, want) = (
        interpreted(op, spec, LENS, q_lens, params=given(spec)) for spec in PAIRS[name].specs()
    )
    for got in (built_in, by_hand):
        assert_attention(tuple(map(torch.from_numpy, got)), tuple(map(torch.from_numpy, want)), "f32")


WIDE = {"format_k": "bf16", "format_v": "bf16", "q_dtype": "bf16", "kv_heads": 8, "group": 4}
LLAMA = {**WIDE, "head_dim": 128, "page_size": 16, "layout": "hnd"}
"""As tests/backends/triton/test_static.py."""


def loop(op: str, spec: Spec) -> dict[str, Any]:
    """The loop over keys in sm_90's machine code."""
    found = kernel(op, spec, "sm_90", "single" if op == "decode" else "").resources()
    return found["decode_split" if op == "decode" else "prefill"]["loop"]


@pytest.mark.parametrize(("name", "op"), [("alibi", "decode"), ("window", "prefill")])
def test_machine_code_of_the_gpu(name: str, op: str) -> None:
    """A window is no part of decode's loop: there, it only says where the loop starts. ALiBi's slopes are
    made before the loop either way."""
    built_in, by_hand = (loop(op, spec) for spec in PAIRS[name].specs(**LLAMA))
    assert by_hand["instr_per_token"] == pytest.approx(built_in["instr_per_token"], rel=0.1)
    assert by_hand["mma"] == built_in["mma"]


def code(text: str) -> list[str]:
    """Lines without comments, docstring, blanks and what the hash of a spec names."""
    text = re.sub(r'\A""".*?"""', "", text, flags=re.DOTALL)
    text = re.sub(r"kvgen_\w+_[0-9a-f]{8}", "kvgen", text)
    lines = (
        re.sub(r"\s*(//|#(?!include|pragma|if|endif|define|undef)).*", "", line) for line in text.splitlines()
    )
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("target", ("cpu", "sm_80", "sm_90", "gfx942"))
@pytest.mark.parametrize("op", ("decode", "prefill"))
def test_a_soft_cap_is_the_same_source(op: str, target: str) -> None:
    """Then nothing else can differ."""
    built_in, by_hand = (code(assemble(spec, target).source(op)) for spec in PAIRS["soft cap"].specs(**LLAMA))
    assert not list(difflib.unified_diff(built_in, by_hand, lineterm=""))


def instructions(library: Path) -> int:
    done = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True)
    return len(re.findall(r"^\s+[0-9a-f]+:\t", done.stdout, re.MULTILINE))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize("op", ("decode", "prefill"))
@pytest.mark.parametrize("name", ("window", "alibi"))
def test_machine_code_of_the_cpu(name: str, op: str) -> None:
    libs = (assemble(spec, "cpu") for spec in PAIRS[name].specs())
    counts = [instructions(lib.kernel(op, "multi" if op == "decode" else "").library.path) for lib in libs]
    assert counts[1] == pytest.approx(counts[0], rel=0.1)
