"""The small formats of the oracle: every code of int4 and e4m3, blocks of d, and int8 arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import reference as ref
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.passes.validate import load_spec
from kvgen.reference.codec import e4m3_to_f64, f32_to_e4m3, pack_nibbles, unpack_nibbles

F32 = np.float32


def test_e4m3_codes_are_torchs() -> None:
    bits = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(e4m3_to_f64(bits), theirs, equal_nan=True)
    assert np.isnan(theirs).sum() == 2


def test_every_e4m3_code_is_encoded_to_itself() -> None:
    bits = np.arange(256, dtype=np.uint8)
    values = e4m3_to_f64(bits).astype(F32)
    assert np.array_equal(f32_to_e4m3(values)[~np.isnan(values)], bits[~np.isnan(values)])
    assert f32_to_e4m3(np.array([np.nan, np.inf, -np.inf, 1e9, -449, 448], F32)).tolist() == [
        0x7F, 0x7E, 0xFE, 0x7E, 0xFE, 0x7E,
    ]  # fmt: skip


def test_e4m3_rounds_to_nearest_even_between_all_neighbours() -> None:
    values = e4m3_to_f64(np.arange(0x7F, dtype=np.uint8))
    middle = ((values[:-1] + values[1:]) / 2).astype(F32)  # exact: one more bit of mantissa
    even = np.arange(0x7E, dtype=np.uint8) + np.arange(0x7E, dtype=np.uint8) % 2
    assert np.array_equal(f32_to_e4m3(middle), even)
    assert np.array_equal(f32_to_e4m3(np.nextafter(middle, F32(0))), np.arange(0x7E))
    assert np.array_equal(f32_to_e4m3(np.nextafter(middle, F32(np.inf))), np.arange(1, 0x7F))


@settings(max_examples=200)
@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=50))
def test_e4m3_rounds_as_torch_does(numbers: list[float]) -> None:
    x = np.array(numbers, F32)
    theirs = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(f32_to_e4m3(x), theirs)


def test_nibbles_are_packed_as_halves() -> None:
    codes = np.arange(-8, 8, dtype=np.int8)
    assert pack_nibbles(codes).tolist() == [
        (low & 15) | (high & 15) << 4 for low, high in zip(range(-8, 0), range(8), strict=True)
    ]
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(pack_nibbles(unpack_nibbles(every)), every)


@pytest.mark.parametrize(("fmt", "qmax"), [("int8", 127), ("int4", 7), ("e4m3", 448)])
def test_blocks_of_d_are_rows_of_their_own(fmt: str, qmax: int) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((5, 2, 64)) * 10.0 ** rng.integers(-3, 4, (5, 2, 1))).astype(F32)
    x[0, 0, 7] = np.nan
    x[1, 0, 40] = np.inf
    x[2, 1, 32:] = 0.0
    codes, scale = ref.encode_rows(x, fmt, 16)
    assert scale.shape == (5, 2, 4)
    values = ref.decode_values(codes, fmt, scale, 16)
    for block in range(4):
        part = slice(16 * block, 16 * block + 16)
        alone = ref.decode_values(*_swap(ref.encode_rows(x[..., part], fmt), fmt))
        assert np.array_equal(values[..., part], alone, equal_nan=True)
    bad = np.isnan(values).reshape(5, 2, 4, 16)
    assert bad[0, 0, 0].all() and bad[1, 0, 2].all() and bad.sum() == 32
    assert scale[2, 1].tolist()[2:] == [0.0, 0.0]
    live = np.abs(x.reshape(5, 2, 4, 16)).max(-1)[3]
    assert np.allclose(scale[3], live / qmax, rtol=1e-6)


def _swap(found: tuple[np.ndarray, np.ndarray], fmt: str) -> tuple[np.ndarray, str, np.ndarray]:
    return found[0], fmt, found[1]


def _spec(**attention: object) -> Spec:
    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "q_dtype": "f32"}
    quant = {"format": "int8", "group": {"tok": 1, "head": 1}}
    cache = {"page_size": 16, "k": quant, "v": quant}
    return load_spec({"attention": heads | attention, "cache": cache})


def _filled(spec: Spec, length: int) -> tuple[object, ...]:
    rng = np.random.default_rng(1)
    record, pages = place(spec), -(-length // 16)
    pools = ref.new_pools(record, pages, fill=0xFF)
    k, v = (rng.standard_normal((length, 2, 32)).astype(F32) for _ in "kv")
    ref.append(spec, record, pools, pages, k, v, np.arange(length))
    q = rng.standard_normal((1, 4, 32)).astype(F32) * 3
    return spec, record, pools, pages, [list(range(pages))], [length], q


def test_int8_scores_are_those_of_the_rounded_query() -> None:
    given_, plain = _filled(_spec(qk="int8"), 40), _filled(_spec(), 40)
    out, lse = ref.decode(*given_)
    rounded = ref.int8_rows(given_[-1])
    assert not np.array_equal(rounded, given_[-1])
    want, want_lse = ref.decode(*plain[:-1], rounded)
    assert np.array_equal(out, want) and np.array_equal(lse, want_lse)
    bad = given_[-1].copy()
    bad[0, 1, 3] = np.inf
    out, _ = ref.decode(*given_[:-1], bad)
    assert np.isnan(out[0, 1]).all() and not np.isnan(out[0, [0, 2, 3]]).any()


@pytest.mark.parametrize("tile", [16, 32])
def test_the_bound_holds_for_weights_rounded_by_tile_and_for_little_more(tile: int) -> None:
    length = 75
    spec, record, pools, pages, table, lens, q = _filled(_spec(), length)
    exact, _ = ref.decode(spec, record, pools, pages, table, lens, q)
    bound = ref.weights_bound(spec, record, pools, pages, table, lens, q, [0, 1], tile)
    (k,), (v,) = ref.gather(spec, record, pools, pages, table, lens)
    scale = np.abs(v).max(-1) / 127  # near enough the stored one: some code of a row is 127
    rounded, coarse = np.zeros_like(exact), np.zeros_like(exact)
    for head in range(4):
        weights = np.exp((q[0, head].astype(float) @ k[:, head // 2].T) * spec.attention.scale)
        weights /= weights.sum()
        for first in range(0, length, tile):
            part = slice(first, first + tile)
            w = weights[part] * scale[part, head // 2]
            codes = v[part, head // 2] / scale[part, head // 2, None]
            for levels, target in ((255, rounded), (60, coarse)):
                step = w.max() / levels
                target[0, head] += (np.rint(w / step) * step) @ codes
    assert (np.abs(rounded - exact) <= bound * (1 + 1e-9)).all()
    assert bound.max() < 0.05 * np.abs(exact).max() * 4
    assert (np.abs(coarse - exact) > np.abs(rounded - exact)).mean() > 0.5
