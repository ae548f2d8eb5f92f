"""The kernels of small floats, segments, latent rows, unrotated keys, masks, rotations and int8 products,
under the address and undefined-behaviour sanitizers. ``test_memory.py`` does the same for plain pages.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.backends.cpu.compiler import find_compiler, sanitizer_libraries
from kvgen.errors import ToolchainError
from kvgen.ir import Spec
from kvgen.library import Library
from kvgen.passes.validate import load_spec
from tests.support.bundle import compile_only
from tests.support.engines import cpu_library, engine_params
from tests.support.sanitize import run_sanitized
from tests.support.variants import VariantCase, variant_spec, wanted_kernels

ROW = {"tok": 1, "head": 1}
INT8 = {"format": "int8", "group": ROW}
SNIPPET = """
import sys
from tests.conformance.test_sanitized import sanitized
from tests.support.bundle import prepare
from tests.support.variants import check_variant
wanted = sanitized(sys.argv[1], sys.argv[2:])
prepare((lib, kernels) for lib, case, kernels in wanted)
for lib, case, _ in wanted:
    print(case.spec.name, check_variant(lib, case, gather=True), flush=True)
"""


def _spec(name: str, k: Any, v: Any, q_dtype: str = "bf16", page_size: int = 16, **attention: Any) -> Spec:
    """Packed rows of three heads a group: vectors have tails, and pages end where their buffers do."""
    heads = {"q_heads": 6, "kv_heads": 2, "head_dim": 64, "q_dtype": q_dtype}
    raw = {key: attention.pop(key) for key in ("keep_first", "keep_last") if key in attention}
    cache = {"page_size": page_size, "align": 1, "layout": "page head tok d", "k": k, "v": v, **raw}
    return load_spec({"name": name, "attention": heads | attention, "cache": cache})


def _terms(name: str, **keys: Any) -> Spec:
    """A spec with terms over packed bf16 rows of 72 elements and pages of 5 tokens."""
    shape = {"page_size": 5, "kv_heads": 2, "group": 3, "head_dim": 72, "q_dtype": "bf16", "align": 1}
    found = variant_spec(**{**shape, **keys}).to_dict()
    return load_spec(found | {"name": name})


CHANNEL = {"format": "int4", "affine": True, "scale_dtype": "f16", "group": {"head": 1, "tok": 16, "d": 1}}
SEGMENTS = {"segments": [{"size": 48, "format": "e4m3", "group": ROW}, {"size": 16, "format": "bf16"}]}
HADAMARD = {"format": "int4", "group": ROW, "transform": "hadamard"}
SPECS = {
    "mxfp4": _spec("mxfp4", {"format": "mxfp4"}, {"format": "mxfp4"}, "f16"),
    "nvfp4": _spec("nvfp4", {"format": "nvfp4"}, {"format": "nvfp4"}),
    "segments": _spec("segments", SEGMENTS, SEGMENTS),
    "raw": _spec("raw", CHANNEL, {"format": "int3", "group": ROW}, "f32", keep_first=3, keep_last=20),
    "hadamard": _spec("hadamard", HADAMARD | {"mean": True}, HADAMARD, "f16"),
    "int8": _spec("int8", INT8, INT8, qk="int8", pv="int8"),
    "mla": _terms("mla", alias=True),
    "pre": _terms("pre", rope="pre half"),
    "pre-interleaved": _terms("pre-interleaved", rope="pre interleaved", format_k="int8-token"),
    "bits": _terms("bits", mask="bool_mask"),
    "tree": _terms("tree", mask="tree"),
    "prefix-documents": _terms("prefix-documents", mask="prefix_lm", score="alibi", sink=True),
}
SHORT = ("mxfp4", "mla", "bits")
"""What the ordinary run takes of them, on the portable row, which GCC instruments whole."""
KERNELS = [("gather", "f32")]


def sanitized(row: str, names: list[str]) -> list[tuple[Library, VariantCase, list[tuple[str, str]]]]:
    """Libraries of a row, the cases that they are shown, and the kernels which these launch."""
    found = []
    for i, name in enumerate(names):
        case = VariantCase(SPECS[name], seed=i, where="heap", most=70, most_q=17, batch=3)
        lib = cpu_library(SPECS[name], row, sanitize=True)
        found.append((lib, case, wanted_kernels(case) + KERNELS))
    return found


def check(row: str, names: list[str]) -> None:
    """Compile here, for a compiler started under the sanitizer's runtime would run under it too."""
    try:
        sanitizer_libraries(find_compiler())
    except ToolchainError as error:
        pytest.skip(f"needs the sanitizers' runtimes: {error}")
    compile_only((lib, kernels) for lib, _, kernels in sanitized(row, names))
    lines = run_sanitized(SNIPPET, row, *names, timeout_s=900).check().splitlines()
    assert lines == [f"{SPECS[name].name} []" for name in names]


def test_a_few_kernels_under_the_sanitizers() -> None:
    check("portable", list(SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("row", engine_params(("avx2", "portable")))
@pytest.mark.parametrize("part", [0, 1, 2])
def test_all_kernels_under_the_sanitizers(row: str, part: int) -> None:
    check(row, list(SPECS)[part::3])
