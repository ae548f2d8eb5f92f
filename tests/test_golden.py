"""Golden sources: some kernels of each backend, as a person reads them.

They are reviewed like code: a change of a template shows here as the change of what it writes. Rewrite them
with ``pytest tests/test_golden.py --update-golden`` and read the diff. Targets and features are fixed, so the
texts depend on no machine.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.backends.protocol import Backend
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.passes.render import render
from kvgen.resolve import backend_for
from kvgen.targets import known_target
from kvgen.tune.defaults import default_schedule
from tests.support.specs import make_spec
from tests.support.variants import variant_spec

LLAMA_BF16 = make_spec("bf16", "bf16", "hnd", 16, 8, 4, 128, q_dtype="bf16")
LLAMA_INT8 = make_spec("int8-token", "int8-token", "hnd", 16, 8, 4, 128, q_dtype="bf16")
ODD_WINDOW = make_spec("f16", "int8-head", "halves-nhd", 5, 2, 3, 72, (True, 128), "f16")
TERMS = variant_spec("document", "alibi", sink=True, rope="pre half", page_size=16, group=2, q_dtype="bf16")
PACKED = make_spec("bf16", "f32", "packed-k", 64, 4, 8, 96, (False, None), "f32")

GOLDEN: dict[str, tuple[str, str, Spec, str, tuple[str, ...]]] = {
    # file: op, variant, spec, target, features
    "cpu_decode_llama_bf16.cpp": ("decode", "single", LLAMA_BF16, "cpu-avx512", ("bf16",)),
    "cpu_decode_multi_llama_int8.cpp": ("decode", "multi", LLAMA_INT8, "cpu-avx2", ()),
    "cpu_decode_multi_terms.cpp": ("decode", "multi", TERMS, "cpu-portable", ()),
    "cpu_prefill_odd_window.cpp": ("prefill", "", ODD_WINDOW, "cpu-avx512", ()),
    "cpu_append_llama_int8.cpp": ("append", "bf16", LLAMA_INT8, "cpu-avx512", ()),
    "cpu_gather_packed.cpp": ("gather", "f32", PACKED, "cpu-portable", ()),
    "cpu_merge_f16.cpp": ("merge", "f16", ODD_WINDOW, "cpu-portable", ()),
    "triton_decode_llama_bf16.py": ("decode", "single", LLAMA_BF16, "sm_90", ()),
    "triton_decode_multi_llama_int8.py": ("decode", "multi", LLAMA_INT8, "sm_80", ()),
    "triton_prefill_odd_window.py": ("prefill", "", ODD_WINDOW, "sm_90", ()),
    "triton_append_llama_int8.py": ("append", "bf16", LLAMA_INT8, "gfx942", ()),
    "triton_gather_packed.py": ("gather", "f32", PACKED, "sm_100", ()),
    "triton_copy_llama_int8.py": ("copy", "", LLAMA_INT8, "sm_80", ()),
}
"""The registered targets and the default schedules; layouts and formats chosen to show every hook."""


def rendered(name: str) -> str:
    op, variant, spec, target_name, features = GOLDEN[name]
    target = replace(known_target(target_name), features=features)
    backend: Backend = backend_for(target)
    schedule = default_schedule(backend, op, spec, target, {})
    return render(backend.plan(op, spec, place(spec), schedule, target, variant))


@pytest.mark.parametrize("name", list(GOLDEN))
def test_source_is_golden(name: str, repo_root: Path, update_golden: bool) -> None:
    path, text = repo_root / "tests" / "golden" / name, rendered(name)
    if update_golden:
        path.write_text(text)
    want = path.read_text() if path.exists() else ""
    if text != want:
        diff = difflib.unified_diff(want.splitlines(), text.splitlines(), f"golden/{name}", "rendered", n=1)
        shown = "\n".join(list(diff)[:60])
        pytest.fail(f"{name} changed; if that is meant, rerun with --update-golden:\n{shown}", pytrace=False)


def test_no_golden_file_is_left_over(repo_root: Path) -> None:
    assert {path.name for path in (repo_root / "tests" / "golden").iterdir()} == set(GOLDEN)


@pytest.mark.parametrize("name", list(GOLDEN))
def test_rendering_twice_gives_the_same_text(name: str) -> None:
    assert rendered(name) == rendered(name)
