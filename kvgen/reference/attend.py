"""attend and merge: softmax attention over ragged requests, and the algebra of its partial states.

A state is (out, lse): the normalised output and the base-2 log of the sum of exponentials. An empty
state is (0, -inf), with true infinities and guarded differences; a large negative number would be
a legal logit. States form a commutative monoid under ``merge`` whose unit is the empty state.

What is not finite, in the terms of docs/numerics.md: scores beyond f32 count as infinities, a visible score
that is NaN or +inf makes its row NaN, and NaN or an infinity in V makes that element of every row that sees
it NaN, whatever its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from kvgen.errors import ArgumentError
from kvgen.reference.codec import Array, widen
from kvgen.reference.terms import Terms

LN2 = float(np.log(2.0))
F32_MAX = float(np.finfo(np.float32).max)


def visible(q_len: int, kv_len: int, *, causal: bool, window: int | None, kv_first: int) -> Array:
    """bool [q, kv]: which keys each query sees. Query i sits at position kv_len - q_len + i.

    Causal: keys up to that position. Window w: not earlier than w before it. Keys before
    ``kv_first`` are dropped for everyone.
    """
    position = np.arange(q_len)[:, None] + (kv_len - q_len)
    key = np.arange(kv_len)[None, :]
    mask = np.broadcast_to(key >= kv_first, (q_len, kv_len))
    if causal:
        mask = mask & (key <= position)
    if window is not None:
        mask = mask & (key >= position - window)
    return mask


def attend(
    q_THD: Array,
    k_list: Sequence[Array],
    v_list: Sequence[Array],
    *,
    q_starts: Sequence[int] | Array,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    kv_first: Sequence[int] | Array | None = None,
    terms: Terms | None = None,
    finalize: bool = True,
) -> tuple[Array, Array]:
    """Attention of each request's queries over its own keys.

    ``q_THD`` [total_q, q_heads, d]; ``k_list[b]`` [kv_b, kv_heads, d] and ``v_list[b]``
    [kv_b, kv_heads, v_d] in any type ``widen`` takes; ``q_starts`` [B + 1] cuts the queries into
    requests; ``kv_first`` [B] drops keys. Returns out f64 [total_q, q_heads, v_d] and lse f64
    [total_q, q_heads], base 2. A query that sees no key gives (0, -inf). A key that a query does
    not see contributes nothing to it, whatever it holds; one that it does see poisons it with its NaN.
    ``terms``, the masks, scores and sink of a spec, stand in for ``causal`` and ``window``; the sink is left
    out where not ``finalize``.
    Raises ``ArgumentError`` for shapes that do not match.
    """
    q = widen(q_THD)
    starts = [int(s) for s in q_starts]
    if len(k_list) != len(v_list) or len(starts) != len(k_list) + 1:
        raise ArgumentError(f"{len(k_list)} k, {len(v_list)} v, {len(starts)} q_starts: expected B, B, B + 1")
    if starts[0] != 0 or starts[-1] != len(q) or any(a > b for a, b in pairwise(starts)):
        raise ArgumentError(f"q_starts = {starts} must rise from 0 to total_q = {len(q)}")
    if not k_list:
        raise ArgumentError("a batch of no request has no v_head_dim here; use kvgen.reference.prefill")
    out = np.zeros((*q.shape[:2], v_list[0].shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    for b, (k, v) in enumerate(zip(k_list, v_list, strict=True)):
        rows = slice(starts[b], starts[b + 1])
        first, q_len = 0 if kv_first is None else int(kv_first[b]), starts[b + 1] - starts[b]
        if terms is None:
            mask = visible(q_len, len(k), causal=causal, window=window, kv_first=first)[None]
            score = None
        else:
            mask = terms.visible(b, starts[b], q_len, len(k)) & (np.arange(len(k)) >= first)
            score = partial(terms.scored, batch=b, first_row=starts[b])
        out[rows], lse[rows] = _one(q[rows], widen(k), widen(v), mask, scale, score)
    if terms is not None and terms.sink is not None and finalize:
        out, lse = add_sink(out, lse, terms.sink)
    return out, lse


def add_sink(out_THD: Array, lse_TH: Array, sink_H: Array) -> tuple[Array, Array]:
    """A state with one more logit for each head, in natural units, that has no value; once, at the end."""
    with np.errstate(invalid="ignore"):
        total = np.logaddexp2(lse_TH, np.where(np.isposinf(sink_H), np.nan, sink_H) / LN2)
        share = np.where((lse_TH == -np.inf) & ~np.isnan(total), 0.0, np.exp2(lse_TH - total))
    return out_THD * share[..., None], total


def beyond(x: Array, largest: float) -> Array:
    """What is larger in magnitude than ``largest`` as an infinity."""
    return np.where(np.abs(x) > largest, np.copysign(np.inf, x), x)


def _one(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    scale: float,
    score: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """One request: q [q, q_heads, d], k [kv, kv_heads, d], v [kv, kv_heads, v_d], mask [q_heads or 1, q, kv],
    ``score``: what is done to scores [q_heads, q, kv]."""
    (q_len, q_heads, _), (kv_len, kv_heads, v_dim) = q.shape, v.shape
    if q_heads % kv_heads or k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        raise ArgumentError(f"q {q.shape}, k {k.shape}, v {v.shape}: heads, lengths or head_dim do not match")
    if q_len == 0 or kv_len == 0:
        return np.zeros((q_len, q_heads, v_dim)), np.full((q_len, q_heads), -np.inf)
    group = q_heads // kv_heads
    q_hgqd = q.reshape(q_len, kv_heads, group, -1).transpose(1, 2, 0, 3)
    with np.errstate(all="ignore"):  # NaN and inf may sit in keys that are masked just below
        scores = beyond(scale * (q_hgqd @ k.transpose(1, 2, 0)[:, None]), F32_MAX)  # [kv_heads, group, q, kv]
        if score is not None:
            scores = score(scores.reshape(q_heads, q_len, kv_len)).reshape(scores.shape)
        mask = np.broadcast_to(mask, (q_heads, q_len, kv_len)).reshape(scores.shape)
        scores = np.where(mask, beyond(scores, F32_MAX * LN2), -np.inf)  # kernels count in base 2
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(top == -np.inf, 0.0, top))
        total = weights.sum(axis=-1)
        rough = ~np.isfinite(v)
        acc = weights @ np.where(rough, 0.0, v).transpose(1, 0, 2)[:, None]
        met = mask.astype(np.float64) @ rough.astype(np.float64).transpose(1, 0, 2)[:, None] > 0
        out = np.where(met, np.nan, np.where(total[..., None] == 0.0, 0.0, acc / total[..., None]))
        lse = np.where(total == 0.0, -np.inf, (top[..., 0] + np.log(total)) / LN2)
    return out.transpose(2, 0, 1, 3).reshape(q_len, q_heads, v_dim), lse.transpose(2, 0, 1).reshape(
        q_len, q_heads
    )


def merge(outs_NTHD: Array, lses_NTH: Array, sink_H: Array | None = None) -> tuple[Array, Array]:
    """N partial states of the same queries -> one state: f64 out [T, H, D] and lse [T, H], base 2.

    An empty state (lse = -inf) adds nothing, whatever its out holds; merging one state with empty
    ones returns it unchanged (its infinities as NaN); none, or only empty ones, give (0, -inf). ``sink_H``
    joins at the end, in natural units. Raises ``ArgumentError`` where the shapes do not belong together.
    """
    if outs_NTHD.ndim != 4 or lses_NTH.shape != outs_NTHD.shape[:3]:
        raise ArgumentError(
            f"outs {outs_NTHD.shape} and lses {lses_NTH.shape}: expected [N, T, H, D] and [N, T, H]"
        )
    outs, lses = widen(outs_NTHD), widen(lses_NTH)
    if len(outs) == 0:
        empty = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
        return empty if sink_H is None else add_sink(*empty, np.asarray(sink_H, np.float64))
    with np.errstate(all="ignore"):
        top = lses.max(axis=0)
        weights = np.exp2(lses - np.where(top == -np.inf, 0.0, top))
        total = weights.sum(axis=0)
        parts = np.where(lses[..., None] == -np.inf, 0.0, weights[..., None] * outs)
        out = np.where(total[..., None] == 0.0, 0.0, parts.sum(axis=0) / total[..., None])
        out = np.where(np.isinf(out), np.nan, out)
        lse = np.where(total == 0.0, -np.inf, top + np.log2(total))
    return (out, lse) if sink_H is None else add_sink(out, lse, np.asarray(sink_H, np.float64))
