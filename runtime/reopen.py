"""reopen: codes of one request back into raw rows, where it is cut to a length at which they are raw again.

The values that come back are those the codes stand for, rounded as raw values are: what they were before
they were quantised is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgen.ir import Spec
from kvgen.runtime.base import Tensor
from kvgen.runtime.cache import RAW_ROWS
from kvgen.runtime.layers import Layer


def reopen(
    layer: Layer, table: np.ndarray, length: int, runs: Sequence[tuple[int, int]], targets: np.ndarray
) -> None:
    """Decode tokens ``runs`` (first, end) of a request and write them into the raw rows of its pages.

    ``table`` (pages,) int32 holds the request's pages at ``length``, at which the tokens are codes;
    ``targets`` the same pages, or copies of them that are to be written to; those have raw rows.
    """
    import torch

    cache, spec = layer.cache, layer.library.spec
    raw = spec.cache.raw
    if raw is None or not runs:
        return
    size = raw.page_size
    # Pages between the protected tokens and the first that is wanted need not be read: the rule says the
    # same of all others when whole pages are left out.
    kept, first = -(-raw.keep_first // size), runs[0][0] // size
    skipped = max(0, first - kept)
    short = np.concatenate([table[: first - skipped], table[first:]])
    device = cache.device
    pages = torch.tensor(short, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([length - skipped * size], dtype=torch.int32, device=device)
    rows = layer.library.gather(cache, pages, lens, dtype=torch.float32)
    tokens = torch.cat([torch.arange(first, end) for first, end in runs]).to(device)
    row = cache.planes[RAW_ROWS][torch.tensor(targets, device=device).long()[tokens // size]].long()
    for field, values in zip(spec.cache.fields, rows, strict=False):
        plane = cache.planes[f"{field}_raw"]
        plane[row, :, tokens % size] = stored(spec, cache, field, values[tokens - skipped * size]).to(
            plane.dtype
        )


def stored(spec: Spec, cache: Any, field: str, values: Tensor) -> Tensor:
    """Values [tokens, head, d] f32 as the cache holds them: without the mean, and rotated."""
    quant = spec.cache.quant(field)
    if quant.mean:
        values = values - cache.planes["k_mean"]
    return hadamard(values) if quant.transform == "hadamard" else values


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, a power of two; its own inverse."""
    import torch

    width = x.shape[-1]
    half = width // 2
    while half:
        a, b = x.reshape(*x.shape[:-1], width // (2 * half), 2, half).unbind(-2)
        x = torch.stack([a + b, a - b], -2).reshape(x.shape)
        half //= 2
    return x * float(np.float32(width**-0.5))
