"""given: scales and means for caches where none are given: checks, tuner, bench, tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgen.ir import Spec
from kvgen.reference.codec import Array

STEP = {"k": 0.031, "v": 0.045}
"""What an eight-bit integer's step is worth, K and V apart; other codecs span as much."""

LARGEST = 16.0
"""What a block's largest magnitude is expected to be, where a scale of all blocks is made up."""

E4M3_TOP = 448.0
"""The largest scale that is stored as e4m3."""


def given_scales(spec: Spec) -> dict[str, Array]:
    """f32 [] or [kv_heads] by the plane that they scale: static scales and outer ones, of all heads
    different."""
    found: dict[str, Array] = {}
    quants = {part.plane: part.quant for side in spec.cache.fields for part in spec.segments(side)}
    for name, _, per_head in spec.given_scales():
        plane, _, kind = name.rpartition("_")
        quant = quants[plane]
        top = quant.fmt.qmax or 1.0
        base = LARGEST / (top * E4M3_TOP) if kind == "outer" else STEP[plane[0]] * 127 / top
        heads = 1 + 0.25 * np.arange(spec.attention.kv_heads if per_head else 1)
        values = (base * heads).astype(np.float32)
        found[plane] = values if per_head else values[0]
    return found


def given_means(spec: Spec, seed: int = 0) -> dict[str, Array]:
    """``{"k": f32 [kv_heads, head_dim]}`` where the spec subtracts a mean of K, else nothing."""
    if not spec.cache.k.mean:
        return {}
    att = spec.attention
    rng = np.random.default_rng(seed)
    return {"k": rng.standard_normal((att.kv_heads, att.head_dim)).astype(np.float32)}


def as_given(scales: dict[str, Array], means: dict[str, Array]) -> dict[str, Any]:
    """The arguments ``scales=`` and ``means=`` of ``new_cache`` and ``adopt``, as tensors; None where there
    are none."""
    import torch

    found = {}
    for name, arrays in (("scales", scales), ("means", means)):
        tensors = {key: torch.from_numpy(np.array(values)) for key, values in arrays.items()}
        found[name] = tensors or None
    return found
