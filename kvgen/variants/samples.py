"""Values of parameters for tests, the tuner and bench rows: hard, but legal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgen.ir import Param, Spec
from kvgen.variants.draw import Array, Draw
from kvgen.variants.registry import Definition, definitions, switched_on

NUMPY = {"f32": np.float32, "i32": np.int32, "i64": np.int64, "bool": np.uint8, "bits": np.uint8}
"""Type of a parameter's array; ``bool`` travels as bytes of 0 and 1."""


def sample_params(
    spec: Spec,
    *,
    kv_lens: Sequence[int] | Array,
    q_starts: Sequence[int] | Array,
    rng: np.random.Generator,
    kv: int | None = None,
) -> dict[str, Array]:
    """An array for each of the spec's parameters, in its type and shape.

    ``kv``: logical positions that they cover, at least the longest request; the default is two more than
    that. Masks drawn for no definition show about half of the keys.
    """
    lens = np.asarray(kv_lens, np.int64)
    longest = int(lens.max(initial=0)) + 2 if kv is None else max(kv, 1)
    draw = Draw(spec.attention.q_heads, lens, np.asarray(q_starts, np.int64), longest, rng)
    own = {
        p.name: d for d in _used(spec) for p in d.formula(spec.attention.option(d.name), draw.heads).params
    }
    found = {}
    for param in spec.attention.params:
        known = own.get(param.name)
        sample = known.sample if known else None
        values = sample(param, draw) if sample else any_values(param, draw)
        found[param.name] = pack_bits(values) if param.dtype == "bits" else values.astype(NUMPY[param.dtype])
    return found


def any_values(param: Param, draw: Draw) -> Array:
    """Numbers around 0, positions, or true and false."""
    shape = draw.shape(param)
    if param.dtype == "f32":
        return draw.rng.standard_normal(shape)
    if param.dtype in ("bool", "bits"):
        return draw.rng.random(shape) < 0.5
    return draw.rng.integers(0, draw.kv, shape)


def pack_bits(values: Array) -> Array:
    """Truth values as bytes of eight along the last dimension, the first in the lowest bit."""
    return np.packbits(values.astype(bool), axis=-1, bitorder="little")


def _used(spec: Spec) -> list[Definition]:
    return [d for d in definitions() if switched_on(spec.attention.option(d.name))]
