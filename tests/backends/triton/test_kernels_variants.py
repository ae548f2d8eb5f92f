"""append, gather and merge of specs with rope, with V as a part of K, and with sinks, interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgen import reference
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.reference.rope import rope_table
from kvgen.variants import positions
from tests.support.oracle import to_numpy
from tests.support.specs import FORMAT_TABLES, make_spec
from tests.support.triton_calls import Pools, kernel

SLOTS = np.array([33, 5, 0, 47, -1, 20, 12, 13, 31], np.int64)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def turning(stored: str, head_dim: int, **rope: Any) -> Spec:
    """A spec whose append rotates keys."""
    table = FORMAT_TABLES[stored]
    return load_spec(
        {
            "name": "turning",
            "attention": {
                "q_heads": 2,
                "kv_heads": 2,
                "head_dim": head_dim,
                "q_dtype": "f32",
                "rope": {"stored": "post", **rope},
            },
            "cache": {"page_size": 16, "layout": "page kv head tok d", "k": table, "v": table},
        }
    )


def part_of_k(stored: str, head_dim: int = 96, v_head_dim: int = 64) -> Spec:
    """A spec whose V is the first ``v_head_dim`` elements of K."""
    return load_spec(
        {
            "name": "latent",
            "attention": {
                "q_heads": 4,
                "kv_heads": 2,
                "head_dim": head_dim,
                "v_head_dim": v_head_dim,
                "q_dtype": "f32",
            },
            "cache": {
                "page_size": 16,
                "layout": "page head tok d",
                "k": FORMAT_TABLES[stored],
                "v": {"alias": "k"},
            },
        }
    )


def rows(width: int, given: str) -> torch.Tensor:
    """[9, 2, width]: a row of zeros, rows with NaN and inf, large and tiny ones, among normal ones."""
    x = torch.randn(9, 2, width, generator=torch.Generator().manual_seed(width)) * 3
    x[0, 0], x[1, 0, 3], x[2, 0, 5] = 0.0, float("nan"), -float("inf")
    x[3, 0, 0], x[5, 1], x[6, 0, :2] = 1e4, 1e-35, torch.tensor([-0.0, 0.0])
    return x.to(DTYPES[given])


def appended(spec: Spec, given: str, **more: Any) -> tuple[Pools, Pools]:
    """The cache after our append, and after the oracle's, from the same rows."""
    ours, theirs = Pools(spec, 3), Pools(spec, 3)
    values = ours.values() | {"slots": torch.from_numpy(SLOTS), "num_tokens": len(SLOTS)}
    given_rows: dict[str, Any] = {"k": None, "v": None}
    for side in spec.cache.fields:
        width = spec.attention.head_dim if side == "k" else spec.attention.v_head_dim
        given_rows[side] = rows(width, given)
        values |= {
            f"{side}_new": given_rows[side],
            f"{side}_new_stride_tok": 2 * width,
            f"{side}_new_stride_head": width,
        }
    kernel("append", spec, variant=given).launch(values | more)
    k, v = (None if x is None else to_numpy(x) for x in given_rows.values())
    oracle: dict[str, Any] = {}
    if more:
        oracle = {
            "positions_T": np.where(SLOTS < 0, 0, more["positions"].numpy()),
            "params": {"rope_table": more["param_rope_table"].numpy()},
        }
    reference.append(spec, theirs.record, theirs.bytes, 3, k, v, SLOTS, scales=theirs.oracle_scales, **oracle)
    return ours, theirs


def assert_equal_bytes(ours: Pools, theirs: Pools) -> None:
    """Every plane holds the same bytes; the payload of a stored NaN is free."""
    got, want = (reference.unpack(p.bytes, p.record, 3) for p in (ours, theirs))
    for name, array in want.items():
        bits = np.dtype(f"u{array.itemsize}")
        same = got[name].view(bits) == array.view(bits)
        if ours.spec.cache.quant(name[0]).format in DTYPES:
            same |= np.isnan(reference.widen(got[name])) & np.isnan(reference.widen(array))
        assert same.all(), f"{name}: {np.argwhere(~same)[:5].tolist()}"


@pytest.mark.parametrize("pairing", ("half", "interleaved"))
@pytest.mark.parametrize(
    ("stored", "given", "head_dim", "dim"),
    [
        ("bf16", "bf16", 64, 64),
        ("bf16", "f32", 72, 72),  # a padded part
        ("f32", "f16", 96, 32),  # ends with a part
        ("f16", "bf16", 80, 72),  # ends within a padded part
        ("f16", "f16", 64, 10),
        ("int8-token", "bf16", 96, 96),
        ("int8-block", "bf16", 64, 48),
        ("int8-head", "f32", 64, 20),
        ("int4-token", "bf16", 96, 80),  # the halves of a byte turn together, or one does not turn
        ("e4m3-token", "f16", 72, 40),
        ("e4m3-tensor", "bf16", 64, 64),
    ],
)
def test_append_rotates_keys_to_the_oracles_bytes(
    stored: str, given: str, head_dim: int, dim: int, pairing: str
) -> None:
    spec = turning(stored, head_dim, kind="default", pairing=pairing, theta=1e4, dim=dim)
    rope = spec.attention.rope
    assert rope is not None
    # Rows of the table are wider than they must be: the stride counts, not the dimension.
    table = torch.full((512, dim + 3), float("nan"))
    table[:, :dim] = torch.from_numpy(rope_table(*positions()[rope.kind].frequencies(rope), 512))
    table = table[:, :dim]
    where = torch.tensor([0, 7, 1, 511, 2**31 - 1, 300, 8, 9, 77], dtype=torch.int32)  # slot -1: not read
    extra = {"positions": where, "param_rope_table": table, "param_rope_table_stride_kv": dim + 3}
    assert_equal_bytes(*appended(spec, given, **extra))


@pytest.mark.parametrize("stored", ("bf16", "int8-token", "e4m3-tensor"))
def test_a_v_that_is_a_part_of_k_is_stored_and_gathered_once(stored: str) -> None:
    spec = part_of_k(stored)
    ours, theirs = appended(spec, "bf16")
    assert_equal_bytes(ours, theirs)
    clean = Pools(spec, 3)
    k = torch.randn(20, 2, 96, generator=torch.Generator().manual_seed(3))
    reference.append(
        spec, clean.record, clean.bytes, 3, k.numpy(), None, np.arange(20), scales=clean.oracle_scales
    )
    out = torch.full((20, 2, 96), float("nan"))
    values = clean.values() | {
        "page_table": torch.tensor([[0, 1, 2**31 - 1]], dtype=torch.int32), "table_stride": 3, "batch": 1,
        "max_kv_len": 20, "kv_lens": torch.tensor([20], dtype=torch.int32), "kv_starts": torch.tensor([0]),
        "k_out": out, "k_out_stride_tok": 192, "k_out_stride_head": 96,
    }  # fmt: skip
    kernel("gather", spec, variant="f32").launch(values)
    want, _ = reference.gather(spec, clean.record, clean.bytes, 3, [[0, 1]], [20], scales=clean.oracle_scales)
    np.testing.assert_array_equal(out.numpy(), want[0].astype(np.float32))


@pytest.mark.parametrize("states", (0, 1, 3))
def test_merge_adds_each_heads_sink_once(states: int) -> None:
    raw = make_spec(group=3, head_dim=24).to_dict()
    raw["attention"] |= {"sink_logit": True}
    spec = load_spec(raw)
    outs, lses = torch.randn(states, 3, 6, 24), torch.randn(states, 3, 6) * 3
    if states:
        lses[0, 0], outs[0, 0], lses[:, 1] = -float("inf"), float("nan"), -float("inf")
    sinks = torch.tensor([0.5, -float("inf"), 60.0, -3.0, 0.0, -80.0])
    out, lse = torch.full((3, 6, 24), float("nan")), torch.full((3, 6), float("nan"))
    values = {
        "outs": outs, "outs_stride_state": 432, "outs_stride_tok": 144, "outs_stride_head": 24,
        "lses": lses, "lses_stride_state": 18, "lses_stride_tok": 6, "param_sink_logit": sinks, "out": out,
        "out_stride_tok": 144, "out_stride_head": 24,
        "lse": lse, "lse_stride_tok": 6, "num_states": states, "num_tokens": 3,
    }  # fmt: skip
    kernel("merge", spec, variant="f32").launch(values)
    # The sink is one more state, whose values are zero.
    base2 = (sinks.double() / np.log(2.0)).expand(1, 3, 6)
    want = reference.merge(
        np.concatenate([outs.double().nan_to_num(), np.zeros((1, 3, 6, 24))]),
        np.concatenate([lses.double(), base2]),
    )
    np.testing.assert_allclose(out.numpy(), want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), want[1], rtol=1e-5, atol=1e-5)
