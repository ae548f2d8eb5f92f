"""Keys of [attention] that only their values together make wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.errors import SpecError
from tests.variants.calls import spec_with

LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN = {"kind": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "rope",
    [
        {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {**YARN, "theta": 1.0},
        {**YARN, "factor": 1e38, "mscale": 1e38, "mscale_all_dim": 1e-37},
    ],
    ids=["no range to interpolate", "theta of 1", "an endless temperature"],
)
def test_rope_without_finite_frequencies_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"attention\.rope = .*not finite"):
        spec_with(rope=rope)


@pytest.mark.parametrize("name", ["bool_mask_stride_q", "rope_table"])
def test_names_of_a_kernels_own_arguments_are_refused(name: str) -> None:
    """``params.x`` of two dimensions has an argument ``param_x_stride_q``, and ``rope`` a table."""
    params = {name: {"dims": ["head"], "dtype": "f32"}}
    keys: dict[str, Any] = {"causal": False, "bool_mask": "bool", "rope": {"stored": "pre"}}
    with pytest.raises(SpecError, match=rf"attention\.params\.{name}.*call it {name}_param"):
        spec_with(score=f"score + {name}[head]", params=params, **keys)
