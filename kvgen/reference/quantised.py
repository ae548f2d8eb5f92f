"""quantised: how far ``pv = "int8"`` may be from the exact product, weight by weight.

Within a tile of keys the weights, times the scales of V, are rounded to ``LEVELS`` steps of the largest
weight times the largest scale of the tile; their sum is not rounded. ``qk = "int8"`` needs no bound: its
query is modelled exactly (``int8_rows``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvgen.ir import PageRecord, Spec
from kvgen.reference.attend import attend
from kvgen.reference.cache import Ints, Scales, gather, scored
from kvgen.reference.codec import Array
from kvgen.reference.layout import Pools
from kvgen.reference.terms import Terms

LEVELS = 127
"""Steps of an eight-bit weight: enough for unsigned codes, for signed ones, and for the eight significant
bits of bf16."""


def weights_bound(
    spec: Spec,
    record: PageRecord,
    pools: Pools,
    num_pages: int,
    page_table: Sequence[Ints] | Array,
    kv_lens: Ints,
    q_THD: Array,
    q_starts: Ints,
    tile: int,
    *,
    scales: Scales = None,
    means: Scales = None,
    scale: float | None = None,
    params: Mapping[str, Array] | None = None,
) -> Array:
    """f64 [total_q, q_heads, v_d]: the largest error that rounding the weights of each tile can make.

    Arguments as of ``prefill``; ``tile`` is the keys between two roundings, in tiles that lie on multiples of
    it. The weight of a key is off by at most half a step and counts with the size of the key's value over its
    scale; a value over the row's largest stands in for that code.
    """
    att = spec.attention
    keys, values = gather(spec, record, pools, num_pages, page_table, kv_lens, scales=scales, means=means)
    q, keys = scored(spec, q_THD, keys, params, means)
    terms = Terms(att, params)
    bound = np.zeros((len(q_THD), att.q_heads, att.v_head_dim))
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(int(q_starts[b]), int(q_starts[b + 1]))
        if len(k) == 0 or rows.start == rows.stop:
            continue
        one_hot = np.repeat(np.eye(len(k))[:, None, :], k.shape[1], axis=1)
        factor = att.scale if scale is None else scale
        weights, _ = attend(
            q[rows], [k], [one_hot], q_starts=[0, rows.stop - rows.start],
            scale=factor, terms=terms.at(b, rows.start), finalize=False,
        )  # fmt: skip
        size = np.abs(np.nan_to_num(v, nan=0.0, posinf=0.0, neginf=0.0)).repeat(att.group, axis=1)
        top = size.max(axis=-1)  # [key, q_head]: a code of 127 (or 7) times the scale
        for first in range(0, len(k), tile):
            part = slice(first, first + tile)
            largest = weights[..., part].max(axis=-1) * top[part].max(axis=0)  # [row, q_head]
            share = size[part] / np.where(top[part] == 0.0, 1.0, top[part])[..., None]
            bound[rows] += largest[..., None] / (2 * LEVELS) * share.sum(axis=0)
    return bound
