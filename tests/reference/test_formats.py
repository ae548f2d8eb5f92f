"""Whole formats: fp4 in blocks, segments, and scales in the page, in a pool of their own or inline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgen import reference as ref
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.reference.layout import join

F32, PAGES, SIZE = np.float32, 5, 16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLE, LENGTH = [3, 0, 4], 37


def make(k: dict[str, Any], v: dict[str, Any], head_dim: int, **cache: Any) -> Spec:
    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "q_dtype": "f32"}
    return load_spec({"attention": heads, "cache": {"page_size": SIZE, "k": k, "v": v, **cache}})


def tokens(head_dim: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(head_dim)
    k, v = (
        rng.standard_normal((LENGTH, 2, head_dim)) * 2.0 ** rng.integers(-3, 4, (LENGTH, 2, 1)) for _ in "kv"
    )
    return k.astype(F32), v.astype(F32)


def filled(spec: Spec, scales: Any = None) -> tuple[Any, ...]:
    record = place(spec)
    pools = ref.new_pools(record, PAGES, fill=0xFF)
    at = np.arange(LENGTH)
    slots = np.array(TABLE)[at // SIZE] * SIZE + at % SIZE
    k, v = tokens(spec.attention.head_dim)
    ref.append(spec, record, pools, PAGES, k, v, slots, scales=scales)
    return spec, record, pools, PAGES, [TABLE], [LENGTH]


def plane(given: tuple[Any, ...], name: str) -> Any:
    """[token, head, d] of one plane, as it is stored."""
    _, record, pools, pages, (table,), (length,) = given
    stored = join(ref.view(pools, record, name, pages))[table]
    return stored.transpose(0, 2, 1, 3).reshape(len(table) * SIZE, 2, -1)[:length]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("fmt", "block"), [("nvfp4", 16), ("mxfp4", 32)])
def test_block_scaled_fp4_at_every_width(fmt: str, block: int, head_dim: int) -> None:
    """Conformance 17: bytes read by hand, two codes in each, scales by torch; attention over their values."""
    spec = make({"format": fmt}, {"format": fmt}, head_dim)
    scales = {"k": F32(0.011), "v": F32(0.013)} if fmt == "nvfp4" else None
    given = filled(spec, scales)
    values = {}
    for side, x in zip("kv", tokens(head_dim), strict=True):
        bytes_ = plane(given, side)
        codes = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)
        numbers = E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
        stored = np.ascontiguousarray(plane(given, f"{side}_scale"))
        if scales:
            found = torch.from_numpy(stored).view(torch.float8_e4m3fn).double().numpy() * float(scales[side])
        else:
            found = 2.0 ** (stored.astype(float) - 127)
        assert found.shape == (LENGTH, 2, head_dim // block)
        values[side] = numbers * found.repeat(block, axis=-1)
        top = np.abs(x).reshape(LENGTH, 2, -1, block).max(-1).repeat(block, axis=-1)
        # Half the widest step, 2 of 6; powers of two may cut off a quarter of the largest.
        assert (np.abs(values[side] - x) <= top * (0.25 if fmt == "mxfp4" else 0.19)).all()
    (k,), (v,) = ref.gather(*given, scales=scales)
    assert np.array_equal(k, values["k"]) and np.array_equal(v, values["v"])
    q = np.random.default_rng(1).standard_normal((1, 4, head_dim))
    out, lse = ref.decode(*given, q, scales=scales)
    for head in range(4):
        scores = values["k"][:, head // 2] @ q[0, head] * head_dim**-0.5
        weights = np.exp(scores - scores.max())
        assert np.allclose(
            out[0, head], weights @ values["v"][:, head // 2] / weights.sum(), rtol=1e-12, atol=1e-12
        )
        assert np.isclose(lse[0, head], (scores.max() + np.log(weights.sum())) / np.log(2), rtol=1e-12)


def test_given_scales_of_fp8_are_honoured_by_both_sides() -> None:
    """Conformance 16: K / 0.25 and V / 0.5 as e4m3 under these scales are the 16-bit values."""
    static = {"format": "e4m3", "group": {}}
    spec, plain = make(static, static, 64), make({"format": "f16"}, {"format": "f16"}, 64)
    scales = {"k": F32(0.25), "v": F32(0.5)}
    record = {s: place(s) for s in (spec, plain)}
    codes = np.random.default_rng(2).integers(0, 0x7F, (2, LENGTH, 2, 64)).astype(np.uint8)
    k, v = (
        torch.from_numpy(part).view(torch.float8_e4m3fn).float().numpy() / 64 * scale
        for part, scale in zip(codes, scales.values(), strict=True)
    )
    slots = np.array(TABLE)[np.arange(LENGTH) // SIZE] * SIZE + np.arange(LENGTH) % SIZE
    q = np.random.default_rng(3).standard_normal((1, 4, 64))
    outs = []
    for one, known in ((spec, {"scales": {n: s / F32(64) for n, s in scales.items()}}), (plain, {})):
        pools = ref.new_pools(record[one], PAGES, fill=0xFF)
        where = (one, record[one], pools, PAGES)
        ref.append(*where, k, v, slots, **known)
        outs.append(ref.decode(*where, [TABLE], [LENGTH], q, **known))
    assert np.array_equal(outs[0][0], outs[1][0]) and np.array_equal(outs[0][1], outs[1][1])


INT3 = {"format": "int3", "affine": True, "group": {"tok": 1, "head": 1, "d": 16}, "scale_dtype": "bf16"}


@pytest.mark.parametrize("where", ["pool", "inline"])
def test_scales_mean_the_same_wherever_they_lie(where: str) -> None:
    given = [filled(make(k, k, 64)) for k in (INT3, INT3 | {"scales": where})]
    names = [p.name for p in given[0][1].planes]
    assert sorted(names) == ["k", "k_min", "k_scale", "k_top", "v", "v_min", "v_scale", "v_top"]
    for name in names:
        assert np.array_equal(plane(given[0], name), plane(given[1], name))
    for a, b in zip(ref.gather(*given[0]), ref.gather(*given[1]), strict=True):
        assert np.array_equal(a[0], b[0]) and not np.isnan(a[0]).any()


SEGMENTS = {
    "segments": [
        {"size": 32, "format": "e4m3", "group": {"tok": 1, "head": 1, "d": 16}},
        {"size": 16, "format": "bf16"},
        {"size": 16, "format": "int3", "affine": True, "scale_dtype": "f16"},
        {"size": 32, "format": "int4", "group": {"head": 1}},
    ]
}


def test_segments_are_stored_each_by_its_own_codec() -> None:
    """As rows of their own widths would be; a given scale is named by its segment's plane."""
    scales = {"k3": np.array([0.6, 0.7], F32)}
    given = filled(make(SEGMENTS, {"format": "bf16"}, 96), scales)
    (k,), _ = ref.gather(*given, scales=scales)
    x, _ = tokens(96)
    start = 0
    for number, part in enumerate(SEGMENTS["segments"]):
        own = {key: value for key, value in part.items() if key != "size"}
        size = part["size"]
        alone = make(own, {"format": "bf16"}, size)
        record, pools = place(alone), ref.new_pools(place(alone), PAGES)
        known = {"k": scales["k3"]} if number == 3 else None
        rows = np.ascontiguousarray(x[..., start : start + size])
        ref.append(alone, record, pools, PAGES, rows, rows, np.arange(LENGTH), scales=known)
        (want,), _ = ref.gather(alone, record, pools, PAGES, [[0, 1, 2]], [LENGTH], scales=known)
        assert np.array_equal(k[..., start : start + size], want)
        start += size
    with pytest.raises(ArgumentError, match=r"scales\['k3'\] is missing"):
        ref.gather(*given)
