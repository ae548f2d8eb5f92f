"""Rotation and mean: what is stored, what comes back, and that attention does not notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen import reference as ref
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.reference.blocks import hadamard
from kvgen.reference.stored import from_stored, to_stored

F32 = np.float32


def make(k: dict[str, Any], v: dict[str, Any] | None = None, head_dim: int = 32, **attention: Any) -> Spec:
    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "q_dtype": "f32"}
    return load_spec({"attention": heads | attention, "cache": {"page_size": 8, "k": k, "v": v or k}})


def sylvester(width: int) -> np.ndarray:
    found = np.ones((1, 1))
    while len(found) < width:
        found = np.block([[found, found], [found, -found]])
    return found


@pytest.mark.parametrize("width", [1, 2, 16, 64, 128, 256])
def test_hadamard_is_the_orthonormal_matrix_and_its_own_inverse(width: int) -> None:
    x = np.random.default_rng(width).standard_normal((3, 2, width))
    assert np.allclose(hadamard(x), x @ sylvester(width) * width**-0.5, rtol=1e-6, atol=1e-6)
    assert np.allclose(hadamard(hadamard(x)), x, rtol=1e-6, atol=1e-6)


def test_hadamard_adds_in_the_order_that_the_format_names() -> None:
    """Pairs at distance D/2, ..., 1, one f32 operation at a time: other orders round otherwise."""
    x = np.random.default_rng(1).standard_normal(64).astype(F32)
    row = [F32(v) for v in x]
    distance = 32
    while distance:
        for i in range(64):
            if i % (2 * distance) < distance:
                row[i], row[i + distance] = F32(row[i] + row[i + distance]), F32(row[i] - row[i + distance])
        distance //= 2
    wanted = np.array([F32(v * F32(64**-0.5)) for v in row], F32)
    found = hadamard(x)
    assert found.dtype == F32 and found.tobytes() == wanted.tobytes()
    other = (x.astype(F32) @ sylvester(64).astype(F32)) * F32(64**-0.5)
    assert found.tobytes() != other.astype(F32).tobytes()


def test_k_is_turned_then_centred_then_rotated() -> None:
    quant = {"format": "int8", "transform": "hadamard", "mean": True}
    spec = make(quant, {"format": "bf16"}, rope={"stored": "post"})
    rng = np.random.default_rng(2)
    x, mean = (rng.standard_normal((n, 2, 32)).astype(F32) for n in (5, 1))
    table = ref.rope_table(10000.0 ** -(np.arange(16) / 16.0), 1.0, 9)
    positions = np.array([3, 8, 0, 1, 7])
    found = to_stored(spec, "k", x, {"k": mean[0]}, positions, table)
    turned = ref.rotate(x, table[positions], spec.attention.rope)
    assert np.array_equal(found, hadamard((turned - mean).astype(F32)))
    back = from_stored(spec, "k", found.transpose(1, 0, 2).astype(float), {"k": mean[0]}).transpose(1, 0, 2)
    assert np.allclose(back, turned, atol=1e-6)


K_WAYS = (
    {"format": "int8", "transform": "hadamard"},
    {"format": "int8", "mean": True},
    {
        "format": "int4",
        "affine": True,
        "group": {"tok": 1, "head": 1, "d": 16},
        "mean": True,
        "transform": "hadamard",
    },
    {"format": "lloyd4", "transform": "hadamard"},
)


def filled(spec: Spec, means: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(4)
    record, pages = place(spec), 4
    pools = ref.new_pools(record, pages, fill=0xFF)
    k, v = (rng.standard_normal((20, 2, spec.attention.head_dim)).astype(F32) for _ in "kv")
    slots = np.array([2, 0, 3])[np.arange(20) // 8] * 8 + np.arange(20) % 8
    ref.append(spec, record, pools, pages, k + (means["k"] if means else 0), v, slots, means=means)
    q = rng.standard_normal((2, 4, spec.attention.head_dim)).astype(F32)
    return (spec, record, pools, pages, [[2, 0, 3], [2, 0, 3]], [20, 13], q), k, v


@pytest.mark.parametrize("k", K_WAYS, ids=str)
def test_attention_in_the_space_of_stored_rows_is_attention(k: dict[str, Any]) -> None:
    """Scores of rotated queries with rotated keys, plus those with the mean; rotated outputs turned back."""
    v = {"format": "int8", "transform": "hadamard"}
    spec = make(k, v)
    means = (
        {"k": np.random.default_rng(3).standard_normal((2, 32)).astype(F32) * 4} if k.get("mean") else None
    )
    given, keys, values = filled(spec, means)
    out, lse = ref.decode(*given, means=means)
    (found, _), (found_v, _) = ref.gather(*given[:-1], means=means)
    plain = keys + means["k"] if means else keys
    assert 0 < np.abs(found - plain).max() < 0.6 and np.abs(found_v - values).max() < 0.05
    q = given[-1].astype(float)
    for b, n in enumerate((20, 13)):
        for head in range(4):
            rotated = hadamard(found - means["k"] if means else found) if "transform" in k else None
            if rotated is None:
                scores = q[b, head] @ found[:n, head // 2].T
            else:
                scores = hadamard(q[b, head]) @ rotated[:n, head // 2].T
                scores = scores + (q[b, head] @ means["k"][head // 2] if means else 0.0)
            scores *= spec.attention.scale
            weights = np.exp(scores - scores.max())
            state = hadamard(weights @ hadamard(found_v[:n, head // 2]) / weights.sum())
            assert np.allclose(out[b, head], state, atol=1e-6)
            assert np.isclose(lse[b, head], np.log2(weights.sum()) + scores.max() / np.log(2), atol=1e-6)


@pytest.mark.parametrize("mean", [False, True])
def test_int8_queries_are_rounded_where_keys_are_stored(mean: bool) -> None:
    spec = make({"format": "int8", "transform": "hadamard", "mean": mean}, {"format": "bf16"}, qk="int8")
    means = {"k": np.full((2, 32), 30.0, F32)} if mean else None
    given, _, _ = filled(spec, means)
    _, lse = ref.decode(*given, means=means)
    (keys, _), _ = ref.gather(*given[:-1], means=means)
    q = given[-1]
    rounded = ref.int8_rows(hadamard(q))
    centred = keys - means["k"] if means else keys
    for head in range(4):
        scores = rounded[0, head] @ hadamard(centred[:, head // 2]).T
        scores += 30.0 * q[0, head].astype(float).sum() if mean else 0.0
        scores *= spec.attention.scale
        top = scores.max()
        assert np.isclose(lse[0, head], (top + np.log(np.exp(scores - top).sum())) / np.log(2), rtol=1e-6)


def test_a_mean_that_is_missing_or_of_another_shape_is_refused() -> None:
    spec = make({"format": "int8", "mean": True}, {"format": "bf16"})
    record = place(spec)
    rows = np.zeros((1, 2, 32), F32)
    for means, match in ((None, "missing"), ({"k": np.zeros((2, 31), F32)}, "expected")):
        with pytest.raises(ArgumentError, match=match):
            ref.append(spec, record, ref.new_pools(record, 1), 1, rows, rows, [0], means=means)
