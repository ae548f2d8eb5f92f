"""Contents of timed caches: finite and of both signs, so that a comparison of outputs means something."""

from __future__ import annotations

import pytest
import torch

from kvgen.gpu_check.scenes import Scenes
from kvgen.runtime.cache import torch_dtype


@pytest.mark.parametrize(("dtype", "most"), [("int8", 64), ("e4m3", 15), ("bf16", 8), ("f32", 8)])
def test_codes_are_moderate(dtype: str, most: float) -> None:
    torch.manual_seed(1)
    tensor = torch.zeros(64, 64, dtype=torch_dtype(dtype))
    Scenes._fill("k", tensor)
    values = tensor.float()
    assert values.isfinite().all() and most / 4 < values.abs().max() <= most
    assert 0.4 < (values < 0).float().mean() < 0.6


def test_scales_and_nibbles() -> None:
    scales = torch.zeros(4)
    Scenes._fill("k_scale", scales)
    assert (scales == 0.02).all()
    pairs = torch.zeros(4096, dtype=torch_dtype("int4x2"))
    Scenes._fill("v", pairs)
    assert pairs.unique().numel() == 256
