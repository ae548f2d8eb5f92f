"""Comparison of a kernel's numbers with the oracle's, infinities and all."""

from __future__ import annotations

import numpy as np
import torch

TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2}
"""Of outputs, by query type: |got - want| <= tolerance * (1 + |want|)."""

LSE_TOLERANCE = {"f32": 2e-5, "f16": 3e-4, "bf16": 3e-4}
"""Of the logsumexp. It is f32 whatever the query's type, but a 16-bit query may meet int8 keys as two int8
digits, whose relative error of 1e-4 is inside the exact class (semantics: qk)."""


def differences(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> list[str]:
    """Empty where all is well, else one line: how many elements are wrong and the worst of them."""
    if tuple(got.shape) != tuple(want.shape):
        return [f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"]
    if torch.equal(got, want):
        return []
    have, need = got.double().numpy(), want.double().numpy()
    with np.errstate(invalid="ignore"):
        error = np.abs(have - need) / (1 + np.abs(need))
    # Infinities must be the same infinity, and NaN stand where NaN is wanted.
    same = (have == need) | (np.isnan(have) & np.isnan(need))
    error = np.where(same, 0.0, np.where(np.isfinite(error), error, np.inf))
    wrong = error > tolerance
    if not wrong.any():
        return []
    at = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    share = f"{int(wrong.sum())} of {wrong.size} elements"
    return [f"{what}: {share} wrong by more than {tolerance:g}; worst at {at}: {have[at]} for {need[at]}"]


def attention(what: str, got: tuple, want: tuple, q_dtype: str) -> list[str]:
    """``differences`` of (out, lse) pairs."""
    return differences(f"{what} out", got[0], want[0], TOLERANCE[q_dtype]) + differences(
        f"{what} lse", got[1], want[1], LSE_TOLERANCE[q_dtype]
    )


def assert_attention(got: tuple, want: tuple, q_dtype: str) -> None:
    """Fail with every difference."""
    assert not (found := attention("attention", got, want, q_dtype)), "\n".join(found)
