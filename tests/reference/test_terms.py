"""The oracle's masks, scores, sinks and rope against formulas written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgen import reference
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.reference import Terms
from kvgen.variants import definitions, positions
from kvgen.variants.samples import pack_bits, sample_params

Q, KV, HEADS = 5, 12, 4


def spec_with(**attention: Any) -> Spec:
    table = {"q_heads": HEADS, "kv_heads": 2, "head_dim": 16, "causal": False} | attention
    side = {"format": "f32"}
    return load_spec({"attention": table, "cache": {"page_size": 4, "k": side, "v": side}})


def seen(params: dict[str, Any] | None = None, **attention: Any) -> np.ndarray[Any, Any]:
    """[q, kv] of request 1 whose first row is 3."""
    return Terms(spec_with(**attention).attention, params).visible(1, 3, Q, KV)[0]


I = np.arange(Q)[:, None] + KV - Q
J = np.arange(KV)[None, :]


class TestMasks:
    def test_plain(self) -> None:
        assert seen().all()
        assert (seen(causal=True) == (J <= I)).all()
        assert (seen(causal=True, window=2) == ((J <= I) & (J >= I - 2))).all()
        assert (seen(window_right=1) == (J <= I + 1)).all()
        assert (seen(chunk=5) == (J // 5 == I // 5)).all()

    def test_those_with_parameters(self) -> None:
        of_batch = np.array([0, 9], np.int32)
        assert (seen({"prefix_len": of_batch}, prefix_lm=True) == ((J <= I) | (J < 9))).all()
        assert (seen({"kv_first": of_batch}, kv_first=True) == np.broadcast_to(J >= 9, (Q, KV))).all()
        starts = np.array([[0] * KV, [0] * 4 + [4] * 5 + [9] * 3], np.int32)
        same = starts[1][None, :] == starts[1][KV - Q :][:, None]
        assert (seen({"doc_start": starts}, document=True) == same).all()

    def test_a_tree(self) -> None:
        parents = [-1, 0, 0, 1, 2]
        rows = np.zeros(3 + Q, np.int64)
        for i, parent in enumerate(parents):
            rows[3 + i] = (rows[3 + parent] if parent >= 0 else 0) | 1 << i
        expected = np.ones((Q, KV), bool)
        for i in range(Q):
            line, at = {i}, parents[i]
            while at >= 0:
                line.add(at)
                at = parents[at]
            expected[i, KV - Q :] = [j in line for j in range(Q)]
        assert (seen({"tree": rows}, tree=True) == expected).all()

    @pytest.mark.parametrize("kind", ["bool", "bits"])
    def test_any_matrix(self, kind: str) -> None:
        matrix = np.random.default_rng(0).random((3 + Q, KV + 1)) < 0.5
        given = pack_bits(matrix) if kind == "bits" else matrix.astype(np.uint8)
        assert (seen({"bool_mask": given}, bool_mask=kind) == matrix[3:, :KV]).all()

    def test_positions_before_the_first_read_it(self) -> None:
        terms = Terms(spec_with(document=True).attention, {"doc_start": np.zeros((1, 3), np.int32)})
        assert terms.visible(0, 0, 5, 2).all()


class TestScores:
    score = np.random.default_rng(1).standard_normal((HEADS, Q, KV)) * 30

    def scored(self, params: dict[str, Any] | None = None, **attention: Any) -> Any:
        return Terms(spec_with(**attention).attention, params).scored(self.score, 1, 3)

    def test_each(self) -> None:
        assert np.allclose(self.scored(soft_cap=20.0), 20 * np.tanh(self.score / 20))
        slope = 2.0 ** (-8 * (np.arange(HEADS) + 1) / HEADS)[:, None, None]
        assert np.allclose(self.scored(alibi=True), self.score - slope * abs(I - J))
        factor = np.arange(HEADS) + 0.5
        assert np.allclose(
            self.scored({"head_scale": factor}, head_scale=True), self.score * factor[:, None, None]
        )

    def test_slopes_of_a_number_that_is_no_power_of_two(self) -> None:
        """Press et al.'s code for 12 heads, of which this shard has 6 to 9."""
        eight = [2.0 ** -(i + 1) for i in range(8)]
        sixteen = [2.0 ** (-(i + 1) / 2) for i in range(16)]
        slope = np.array((eight + sixteen[0::2])[6:10])[:, None, None]
        found = self.scored(alibi={"heads": 12, "offset": 6})
        assert np.allclose(found, self.score - slope * abs(I - J))

    def test_the_cap_comes_last(self) -> None:
        found = self.scored(soft_cap=20.0, score="score + 1000.0 * (kv_pos - 5)")
        assert (abs(found) <= 20).all()


def test_a_sink_takes_its_share_once() -> None:
    rng = np.random.default_rng(2)
    spec = spec_with(sink_logit=True)
    sinks = np.array([0.5, -np.inf, 3.0, -100.0])
    q, k, v = (
        rng.standard_normal((3, HEADS, 16)),
        rng.standard_normal((6, 2, 16)),
        rng.standard_normal((6, 2, 16)),
    )
    out, lse = reference.attend(
        q,
        [k, k[:0]],
        [v, v[:0]],
        q_starts=[0, 2, 3],
        scale=0.3,
        terms=Terms(spec.attention, {"sink_logit": sinks}),
    )
    scores = 0.3 * np.einsum("thd,khd->thk", q[:2], k.repeat(2, axis=1))
    weights = np.exp(scores)
    total = weights.sum(-1) + np.exp(sinks)
    assert np.allclose(out[:2], np.einsum("thk,khd->thd", weights, v.repeat(2, axis=1)) / total[..., None])
    assert np.allclose(lse[:2], np.log2(total))
    assert (out[2] == 0).all() and np.allclose(lse[2], sinks / np.log(2))
    part = reference.attend(
        q, [k, k[:0]], [v, v[:0]], q_starts=[0, 2, 3], scale=0.3, finalize=False,
        terms=Terms(spec.attention, {"sink_logit": sinks}),
    )  # fmt: skip
    merged = reference.merge(part[0][None], part[1][None], sinks)
    assert np.allclose(merged[0], out) and np.allclose(merged[1], lse)


def test_a_missing_parameter_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="params\\['kv_first'\\] is missing"):
        Terms(spec_with(kv_first=True).attention)


def test_samples_fit_their_parameters() -> None:
    rng = np.random.default_rng(3)
    for found in definitions():
        spec = spec_with(**({"causal": True} | dict(found.example)))
        params = sample_params(spec, kv_lens=[0, 7, 40], q_starts=[0, 2, 5, 9], rng=rng)
        assert params.keys() == {p.name for p in spec.attention.params}
        terms = Terms(spec.attention, params)
        assert terms.visible(2, 5, 4, 40).shape[1:] == (4, 40)
        assert terms.scored(np.zeros((HEADS, 4, 40)), 2, 5).shape == (HEADS, 4, 40)


class TestRope:
    @pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
    def test_frequencies_are_those_of_transformers(self, kind: str) -> None:
        pytest.importorskip("transformers")
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        own = dict(positions()[kind].example)
        rope = spec_with(head_dim=64, rope={"kind": kind, "theta": 5e5, **own}).attention.rope
        assert rope is not None
        found, factor = positions()[kind].frequencies(rope)
        if kind == "default":
            expected, scaling = 5e5 ** (-np.arange(0, 64, 2) / 64), 1.0
        else:
            table = {"rope_type": kind, "rope_theta": 5e5, **own}
            config = LlamaConfig(
                hidden_size=256, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=table
            )
            given, scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
            expected = given.numpy()
        assert np.allclose(found, expected, rtol=1e-6) and factor == pytest.approx(scaling)

    @pytest.mark.parametrize("pairing", ["half", "interleaved"])
    def test_turning(self, pairing: str) -> None:
        rope = spec_with(rope={"pairing": pairing, "dim": 8}).attention.rope
        assert rope is not None
        table = reference.rope_table([1.0, 0.5, 0.25, 0.125], 1.0, 4)
        x = np.random.default_rng(4).standard_normal((2, 1, 16))
        found = reference.rotate(x, table[[0, 3]], rope)
        assert np.allclose(found[0], x[0]) and (found[:, :, 8:] == x[:, :, 8:]).all()
        for i, frequency in enumerate([1.0, 0.5, 0.25, 0.125]):
            at = (i, i + 4) if pairing == "half" else (2 * i, 2 * i + 1)
            turned = (x[1, 0, at[0]] + 1j * x[1, 0, at[1]]) * np.exp(3j * frequency)
            assert np.allclose(
                [found[1, 0, at[0]], found[1, 0, at[1]]], [turned.real, turned.imag], atol=1e-6
            )
