"""Attention on the CPU at the edges of its blocks: an infinite value in the last, odd row."""

from __future__ import annotations

import pytest
import torch

import kvgen
from tests.support.specs import make_spec


@pytest.mark.parametrize("stored", ["bf16", "f32"])
@pytest.mark.parametrize("keys", [1, 5, 6, 33])
def test_an_infinite_value_in_the_last_row_makes_nan_of_its_element_only(stored: str, keys: int) -> None:
    spec = make_spec(stored, stored, "hnd", 16, 2, 4, 64, q_dtype="bf16")
    library = kvgen.build(spec, tune="off")
    cache = library.new_cache(4)
    k = torch.zeros(keys, 2, 64)
    v = torch.ones(keys, 2, 64)
    v[-1, 0, 3], v[-1, 1, 40] = float("inf"), float("-inf")
    library.append(cache, k, v, torch.arange(keys))
    table = torch.arange(4, dtype=torch.int32)[None]
    q = torch.zeros(1, 8, 64, dtype=torch.bfloat16)
    out, lse = library.decode(q, cache, table, torch.tensor([keys], dtype=torch.int32))
    want = torch.ones(1, 8, 64)
    want[:, :4, 3], want[:, 4:, 40] = float("nan"), float("nan")
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=0, equal_nan=True)
    torch.testing.assert_close(lse, torch.full((1, 8), keys, dtype=torch.float32).log2(), rtol=0, atol=1e-5)
