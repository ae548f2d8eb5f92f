"""The check finds faults: kernels are broken on purpose, one way each, and must be called wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvgen.errors import UnsupportedError
from kvgen.library import Library
from kvgen.passes.abi import VARIANTS
from kvgen.tune.check import check_library, check_op

Broken = Callable[..., Library]

FAULTS = {
    "scale-of-scores": ("decode", "", "(float)a.score_scale", "(float)a.score_scale * 1.001f"),
    "causal-off-by-one": ("prefill", "", "pos_last + 1)", "pos_last + 2)"),
    "causal-hides-own-key": ("prefill", "", "pos_last + 1)", "pos_last)"),
    "reads-past-the-length": (
        "decode",
        "",
        "kv_len = a.kv_lens[b];",
        "kv_len = a.kv_lens[b] + (a.kv_lens[b] % PAGE != 0);",
    ),
    "drops-the-last-key": ("decode", "", "r.hi = kv_len", "r.hi = kv_len - (kv_len > 900)"),
    "writes-an-extra-byte": ("append", "", "  return 0;", "  ((char*)a.v)[40] ^= 1;\n  return 0;"),
    "codes-too-small": ("append", "bf16", "inv = 1.0f / scale;", "inv = 0.997f / scale;"),
    "shares-a-scale": ("gather", "f16", "V_SCALE_STRIDE_HEAD + tok]", "V_SCALE_STRIDE_HEAD]"),
    "copies-too-much": ("copy", "", "to = a.dst_pages[pair];", "to = a.dst_pages[pair] ^ (pair == 3);"),
    "writes-outside-out": ("merge", "", "  return 0;", "  a.out[V_HEAD_DIM] = 1;\n  return 0;"),
}
"""Name -> op, variant, text of its source, what to put there."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_kernel_is_called_wrong(broken: Broken, name: str) -> None:
    op, variant, old, new = FAULTS[name]
    verdict = check_op(broken(old, new), op, variant)
    assert not verdict.ok
    assert verdict.message
    assert "wrong in" in str(verdict)


def test_a_nan_that_leaks_is_told_as_such(broken: Broken) -> None:
    verdict = check_op(
        broken("kv_len = a.kv_lens[b];", "kv_len = a.kv_lens[b] + (a.kv_lens[b] % PAGE != 0);"), "decode"
    )
    assert "NaN" in verdict.message
    assert np.isnan(verdict.error)


def test_a_window_off_by_one_is_wrong(broken: Broken) -> None:
    old, new = "constexpr int WINDOW = 33;", "constexpr int WINDOW = 34;"
    assert not check_op(broken(old, new, window=33), "decode").ok
    assert not check_op(broken(old, new, window=33), "prefill").ok


def test_every_sound_kernel_passes(broken: Broken) -> None:
    verdicts = list(check_library(broken("#include", "#include")))
    assert [(v.op, v.variant) for v in verdicts] == [(op, v) for op, names in VARIANTS.items() for v in names]
    for verdict in verdicts:
        assert verdict.ok, str(verdict)
        assert verdict.error <= verdict.tolerance


def test_unknown_ops_and_variants_are_refused(broken: Broken) -> None:
    library = broken("", "")
    with pytest.raises(UnsupportedError, match="the ops are append, decode"):
        check_op(library, "fly")
    with pytest.raises(UnsupportedError, match="copy has no variant"):
        check_op(library, "copy", "bf16")
