"""attend and merge: closed-form answers, and a second implementation one key at a time."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.errors import ArgumentError
from kvgen.reference import attend, merge

INF = math.inf


def naive(
    q: Any, k: Any, v: Any, scale: float, causal: bool, window: int | None, first: int
) -> tuple[Any, Any]:
    """One request, query by query, head by head, key by key, over the keys it sees and no others."""
    (q_len, q_heads, _), (kv_len, kv_heads, v_dim) = q.shape, v.shape
    out, lse = np.zeros((q_len, q_heads, v_dim)), np.full((q_len, q_heads), -INF)
    for i in range(q_len):
        at = kv_len - q_len + i
        low = max(first, 0 if window is None else at - window)
        keys = range(max(low, 0), min(at + 1, kv_len) if causal else kv_len)
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            scores = [scale * math.fsum(q[i, h] * k[j, g]) for j in keys]
            if not scores:
                continue
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            total = math.fsum(weights)
            out[i, h] = sum(w / total * v[j, g] for w, j in zip(weights, keys, strict=True))
            lse[i, h] = (top + math.log(total)) / math.log(2)
    return out, lse


@given(
    seed=st.integers(0, 2**32 - 1),
    lens=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 3, 9])), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (6, 2), (7, 1), (4, 4)]),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 5),
    first=st.integers(0, 3),
)
def test_agrees_with_one_key_at_a_time(
    seed: int,
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    causal: bool,
    window: int | None,
    first: int,
) -> None:
    """Ragged, with more queries than keys, fewer, none; V narrower than K."""
    rng = np.random.default_rng(seed)
    q_heads, kv_heads = heads
    qs = [rng.standard_normal((n, q_heads, 16)) for n, _ in lens]
    ks = [rng.standard_normal((n, kv_heads, 16)) for _, n in lens]
    vs = [rng.standard_normal((n, kv_heads, 8)) for _, n in lens]
    starts = np.cumsum([0] + [len(q) for q in qs])
    options = {"causal": causal, "window": window}
    firsts = [first] * len(lens)
    out, lse = attend(np.concatenate(qs), ks, vs, q_starts=starts, scale=0.3, kv_first=firsts, **options)
    for b, (q, k, v) in enumerate(zip(qs, ks, vs, strict=True)):
        want_out, want_lse = naive(q, k, v, 0.3, causal, window, first)
        assert np.allclose(out[starts[b] : starts[b + 1]], want_out, rtol=1e-12, atol=1e-13)
        assert np.allclose(lse[starts[b] : starts[b + 1]], want_lse, rtol=1e-12, atol=1e-13)


def test_very_negative_logits() -> None:
    """Conformance 1: no finite sentinel hides a logit of -524,288 / sqrt(128)."""
    q, k = np.full((1, 32, 128), 64.0), np.full((2, 4, 128), -64.0)
    for scale in (128**-0.5, 1.0):
        out, lse = attend(q, [k], [np.ones((2, 4, 128))], q_starts=[0, 1], scale=scale)
        assert (out == 1.0).all()
        assert np.allclose(lse, (-524288.0 * scale + math.log(2)) / math.log(2), rtol=1e-15, atol=0)


def test_one_key() -> None:
    """Conformance 2: a softmax over one key is that key's value, in every bit."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, 8, 64)),
        rng.standard_normal((1, 2, 64)),
        rng.standard_normal((1, 2, 64)),
    )
    out, lse = attend(q, [k], [v], q_starts=[0, 1], scale=0.125)
    assert np.array_equal(out, np.repeat(v, 4, axis=1))
    assert np.allclose(lse[0, 5], 0.125 * (q[0, 5] @ k[0, 1]) / math.log(2))


def test_fully_masked_rows() -> None:
    """Conformance 3: 34 queries over 1 key: only the last one sees it."""
    q, k, v = np.zeros((34, 4, 16)), np.zeros((1, 4, 16)), np.ones((1, 4, 16))
    out, lse = attend(q, [k], [v], q_starts=[0, 34], scale=0.25)
    assert (out[:33] == 0).all() and (lse[:33] == -INF).all()
    assert (out[33] == 1).all() and (lse[33] == 0).all()


def test_empty_request_beside_a_full_one() -> None:
    """Conformance 5."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 4, 16)), rng.standard_normal((129, 2, 16))
    out, lse = attend(q, [k[:0], k], [k[:0], k], q_starts=[0, 1, 2], scale=0.25)
    assert (out[0] == 0).all() and (lse[0] == -INF).all()
    alone, alone_lse = attend(q[1:], [k], [k], q_starts=[0, 1], scale=0.25)
    assert np.array_equal(out[1:], alone) and np.array_equal(lse[1:], alone_lse)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_unseen_keys_contribute_nothing_whatever_they_hold(poison: float) -> None:
    """Causal future, outside the window, before kv_first: all poisoned; the answer is the clean one."""
    rng = np.random.default_rng(2)
    q, k, v = (
        rng.standard_normal((3, 4, 16)),
        rng.standard_normal((20, 2, 16)),
        rng.standard_normal((20, 2, 16)),
    )
    options: dict[str, Any] = {"q_starts": [0, 3], "scale": 0.25, "window": 6, "kv_first": [13]}
    clean = attend(q, [k], [v], **options)
    k[:13], v[:13] = poison, poison
    assert all(np.array_equal(a, b) for a, b in zip(attend(q, [k], [v], **options), clean, strict=True))
    k[19], v[19] = poison, poison  # only the last query sees it
    out, lse = attend(q, [k], [v], **options)
    assert np.array_equal(out[:2], clean[0][:2]) and np.array_equal(lse[:2], clean[1][:2])
    assert not np.isfinite(out[2]).any()


def test_poison_in_v_stays_in_its_element() -> None:
    v = np.ones((3, 1, 16))
    v[1, 0, 5] = np.nan
    out, lse = attend(np.zeros((1, 1, 16)), [np.zeros((3, 1, 16))], [v], q_starts=[0, 1], scale=1.0)
    assert (
        np.isnan(out[0, 0, 5]) and np.allclose(np.delete(out[0, 0], 5), 1) and np.allclose(lse, math.log2(3))
    )


@pytest.mark.parametrize("window, seen", [(0, 1), (3, 4), (128, 129)])
def test_window_keeps_w_earlier_keys_and_the_own(window: int, seen: int) -> None:
    """Conformance 23: a one-hot V at every position; equal scores share the weight among w + 1 keys."""
    q, k, v = np.zeros((1, 1, 16)), np.zeros((300, 1, 16)), np.eye(300)[:, None, :]
    out, lse = attend(q, [k], [v], q_starts=[0, 1], scale=1.0, window=window)
    expected = np.where(np.arange(300) >= 300 - seen, 1 / seen, 0.0)
    assert np.allclose(out[0, 0], expected, rtol=1e-13) and np.allclose(lse, math.log2(seen))


def test_window_without_causal_is_open_to_the_right() -> None:
    out, lse = attend(
        np.zeros((4, 1, 16)),
        [np.zeros((10, 1, 16))],
        [np.ones((10, 1, 16))],
        q_starts=[0, 4],
        scale=1.0,
        causal=False,
        window=2,
    )
    assert np.allclose(lse[:, 0], np.log2([6, 5, 4, 3])) and (out == 1).all()


def test_merge_of_empty_states() -> None:
    """Conformance 6: two, one, none; an empty state's out may be NaN; the other state is unchanged."""
    empty = np.full((2, 3, 4, 8), np.nan), np.full((2, 3, 4), -INF)
    for n in (0, 1, 2):
        out, lse = merge(empty[0][:n], empty[1][:n])
        assert out.shape == (3, 4, 8) and (out == 0).all() and (lse == -INF).all()
    rng = np.random.default_rng(3)
    finite = rng.standard_normal((1, 3, 4, 8)), rng.standard_normal((1, 3, 4)) * 1e5
    for states in ((finite, empty), (empty, finite)):
        out, lse = merge(*(np.concatenate(part) for part in zip(*states, strict=True)))
        assert np.array_equal(out, finite[0][0]) and np.array_equal(lse, finite[1][0])


@pytest.mark.parametrize("base", [-1e5, 1e5, 0.0])
def test_merge_far_from_zero(base: float) -> None:
    """Conformance 8: the weights depend on differences only."""
    outs = np.stack([np.full((1, 1, 4), 1.0), np.full((1, 1, 4), 4.0)])
    out, lse = merge(outs, np.array([[[base]], [[base + 1]]]))
    assert np.allclose(out, 3.0, rtol=1e-12) and np.allclose(lse, base + math.log2(3), rtol=1e-14)


@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_merge_of_any_split_is_the_whole(seed: int, cuts: list[int]) -> None:
    """Conformance 4: empty chunks included."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((2, 4, 16)),
        rng.standard_normal((40, 2, 16)),
        rng.standard_normal((40, 2, 16)),
    )
    edges = [0, *sorted(cuts), 40]
    options: dict[str, Any] = {"q_starts": [0, 2], "scale": 2.0, "causal": False}
    parts = [attend(q, [k[a:b]], [v[a:b]], **options) for a, b in pairwise(edges)]
    out, lse = merge(np.stack([p[0] for p in parts]), np.stack([p[1] for p in parts]))
    whole = attend(q, [k], [v], **options)
    assert np.allclose(out, whole[0], rtol=1e-12, atol=1e-14) and np.allclose(lse, whole[1], rtol=1e-13)


def test_shapes_that_do_not_match_are_refused() -> None:
    q, k = np.zeros((2, 4, 16)), np.zeros((3, 2, 16))
    for starts, keys, values in (
        ([0, 1], [k], [k]),
        ([1, 2], [k], [k]),
        ([0, 2, 1], [k, k], [k, k]),
        ([0, 2], [k, k], [k, k]),
        ([0, 2], [k[:2]], [k]),
        ([0, 2], [k[..., :8]], [k]),
        ([0, 2], [k[:, [0, 0, 0]]], [k[:, [0, 0, 0]]]),
        ([0], [], []),
    ):
        with pytest.raises(ArgumentError):
            attend(q, keys, values, q_starts=starts, scale=1.0)
    with pytest.raises(ArgumentError, match="expected"):
        merge(np.zeros((2, 3, 4, 8)), np.zeros((3, 4)))
