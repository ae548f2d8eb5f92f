"""call_params: values for a call's parameters where none are given: tests, tuner, bench, GPU check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen import reference
from kvgen.ir import Spec
from kvgen.reference.codec import Array
from kvgen.variants import positions
from kvgen.variants.samples import sample_params

if TYPE_CHECKING:
    import torch


def call_params(
    spec: Spec,
    kv_lens: Sequence[int] | Array,
    q_starts: Sequence[int] | Array,
    rng: np.random.Generator,
    *,
    kv: int | None = None,
) -> dict[str, Array]:
    """Arrays for all parameters of decode and prefill by name (``sample_params``), and the table of angles
    where K is rotated when it is read. ``kv``: positions that they cover; default: two more than the longest
    request.
    """
    found = sample_params(spec, kv_lens=kv_lens, q_starts=q_starts, rng=rng, kv=kv)
    rope = spec.attention.rope
    if rope and rope.stored == "pre":
        longest = int(np.max(kv_lens, initial=0)) + 2 if kv is None else kv
        found["rope_table"] = angles(spec, longest)
    return found


def angles(spec: Spec, count: int) -> Array:
    """f32 [count, rotary elements]: the spec's table of angles, by the reference."""
    rope = spec.attention.rope
    assert rope is not None
    steps, factor = positions()[rope.kind].frequencies(rope)
    return reference.rope_table(steps, factor, count)


def as_tensors(params: dict[str, Array], device: Any = "cpu") -> dict[str, torch.Tensor] | None:
    """The same as tensors for ``params=``; None where there are none."""
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in params.items()} or None
