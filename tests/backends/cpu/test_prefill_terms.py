"""Masks, scores, sinks, turned keys and a V inside K, in prefill on the CPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.support.bundle import prepare
from tests.support.compare import assert_attention
from tests.support.engines import cpu_library, engine_params
from tests.support.prefill_calls import PrefillCall
from tests.support.world import HUGE_IDS

TOKEN = {"tok": 1, "head": 1}
BLOCKS = {**TOKEN, "d": 16}
BF16 = {"format": "bf16"}


def of(k: dict[str, Any], v: dict[str, Any], page: int = 16, group: int = 3, **attention: Any) -> Spec:
    """Two KV heads; K and V of their own format."""
    heads = {"q_heads": 2 * group, "kv_heads": 2, "head_dim": 64, "q_dtype": "bf16"}
    cache = {"page_size": page, "layout": "page kv head tok d", "k": k, "v": v}
    return load_spec({"name": "terms", "attention": {**heads, **attention}, "cache": cache})


BIAS = {"bias": {"dims": ["q", "kv"], "dtype": "f32"}}
SPECS = {
    "tree": of(BF16, BF16, group=5, causal=False, tree=True),
    "bits, window, e4m3": of(
        {"format": "e4m3", "group": BLOCKS}, {"format": "e4m3", "group": TOKEN},
        page=5, causal=False, window=90, bool_mask="bits",
    ),
    "heads differ, int4": of(
        {"format": "int4", "group": TOKEN}, {"format": "int4", "group": BLOCKS},
        group=7, mask="(kv_pos + head) % 3 != 0",
    ),
    "documents, f32": of({"format": "f32"}, {"format": "f32"}, q_dtype="f32", causal=False, document=True),
    "prefix, cap, scales, sink": of(
        {"format": "f16"}, {"format": "f16"}, q_dtype="f16",
        causal=False, prefix_lm=True, soft_cap=5.0, head_scale=True, sink_logit=True,
    ),
    "alibi, bias of each key": of(
        BF16, BF16, page=6,
        alibi={"heads": 10, "offset": 4}, score="score + bias[q_row, kv_pos]", params=BIAS,
    ),
    "later rows see less": of(BF16, BF16, causal=False, mask="kv_pos <= 300 - 2 * q_pos"),
    "chunk, latent": of(
        BF16, {"alias": "k"}, q_heads=32, kv_heads=1, head_dim=144, v_head_dim=128, chunk=40,
    ),
    "turned when read": of(
        {"format": "int8", "group": BLOCKS}, {"format": "int8", "group": TOKEN},
        rope={"kind": "default", "stored": "pre", "dim": 48, "pairing": "interleaved"},
    ),
}  # fmt: skip
HIDDEN = {
    "bf16": of(BF16, BF16, causal=False, bool_mask="bool"),
    "f16": of({"format": "f16"}, {"format": "f16"}, causal=False, bool_mask="bool"),
    "e4m3-block": of(*[{"format": "e4m3", "group": BLOCKS}] * 2, causal=False, bool_mask="bool"),
    "latent": of(BF16, {"alias": "k"}, v_head_dim=48, causal=False, bool_mask="bool"),
}
LENS, Q_LENS = [300, 0, 17, 1, 600, 5, 256, 16], [37, 2, 17, 5, 64, 9, 3, 16]


@pytest.fixture(scope="module", params=engine_params(("avx512-bf16", "avx2", "portable")))
def libraries(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every spec of this file on one ISA row, compiled together."""
    found = {spec.hash: cpu_library(spec, request.param) for spec in (*SPECS.values(), *HIDDEN.values())}
    prepare((lib, [("prefill", ""), ("append", "f32")]) for lib in found.values())
    return found


@pytest.mark.parametrize("name", list(SPECS))
def test_every_kind_of_term_is_the_oracles(libraries: dict[str, Any], name: str) -> None:
    """Ragged requests of several tiles and units; more queries than keys; with a sink, also unfinished."""
    spec = SPECS[name]
    call = PrefillCall(libraries[spec.hash], LENS, Q_LENS)
    assert_attention(call.run(threads=2), call.want(), spec.attention.q_dtype)
    if spec.attention.sink:
        assert_attention(call.run(finalize=False), call.want(finalize=False), spec.attention.q_dtype)


@pytest.mark.parametrize("name", list(SPECS))
def test_bits_do_not_depend_on_how_a_prompt_is_cut(libraries: dict[str, Any], name: str) -> None:
    spec = SPECS[name]
    call = PrefillCall(libraries[spec.hash], [420], [420])
    if "tree" in call.params:
        # Which new tokens are seen is said by their number in the call: here, by none of them.
        call.params["tree"] = np.zeros_like(call.params["tree"])
        cuts: tuple[int, ...] = ()
    else:
        cuts = (1, 255, 300, 419)
    whole = call.run(threads=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, call.run(), strict=True))
    for cut in cuts:
        part = call.run(first=cut)
        assert torch.equal(part[0], whole[0][cut:]) and torch.equal(part[1], whole[1][cut:]), cut


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", list(HIDDEN))
def test_what_a_row_does_not_see_stays_out_of_it(libraries: dict[str, Any], name: str, side: str) -> None:
    """NaN in a key, at an odd and at an even place of its pair, that every second row sees."""
    spec = HIDDEN[name]
    for at in (40, 41):

        def poison(k: torch.Tensor, v: torch.Tensor, at: int = at) -> None:
            (k if side == "k" or spec.cache.alias else v)[at, :, 7] = torch.nan

        mask = np.random.default_rng(at).integers(0, 2, (70, 72), np.uint8)
        mask[:, at] = np.arange(70) % 2
        call = PrefillCall(libraries[spec.hash], [70], [70], params={"bool_mask": mask}, edit=poison)
        got, want = call.run(), call.want()
        blind = np.arange(70) % 2 == 0
        assert_attention((got[0][blind], got[1][blind]), (want[0][blind], want[1][blind]), "bf16")
        assert got[0][~blind][:, :, 7].isnan().all()


FREED = {
    "chunk": of(BF16, BF16, page=4, chunk=100),
    "document": of(BF16, BF16, page=4, causal=False, document=True),
    "kv_first": of(BF16, BF16, page=4, kv_first=True, soft_cap=30.0),
    "window both ways": of(BF16, BF16, page=4, causal=False, window=60, window_right=7),
}


def test_pages_that_no_query_sees_are_not_looked_up() -> None:
    """Their ids are numbers that no pool has, and checked mode accepts them."""
    libs = {name: cpu_library(spec, "portable") for name, spec in FREED.items()}
    prepare((lib, [("prefill", ""), ("append", "f32")]) for lib in libs.values())
    starts = np.concatenate([np.zeros(150, np.int32), np.full(352, 150, np.int32)])[None]
    given = {"document": {"doc_start": starts}, "kv_first": {"kv_first": np.array([222], np.int32)}}
    for name, first_key in (("chunk", 400), ("document", 150), ("kv_first", 222), ("window both ways", 380)):
        call = PrefillCall(libs[name], [500], [60], params=given.get(name))
        whole, want = call.run(), call.want()
        assert_attention(whole, want, "bf16")
        freed = call.table.clone()
        freed[0, : first_key // 4] = HUGE_IDS[0]
        part = call.run(table=freed)
        assert torch.equal(part[0], whole[0]) and torch.equal(part[1], whole[1]), name


def test_sources_hold_what_is_used_and_no_more() -> None:
    """No path for whole tiles where none is ever whole; no mask of a tile where intervals say all."""
    never = cpu_library(HIDDEN["bf16"], "avx2").source("prefill")
    assert "MASKED" not in never and "see_all" not in never and "find_seen" in never
    intervals = cpu_library(SPECS["chunk, latent"], "avx2").source("prefill")
    assert "find_seen" not in intervals and "attend_block<false>" in intervals
    assert not re.search(r"\ba\.v\b|v_scale|stage_v", intervals)
    plain = cpu_library(of(BF16, BF16), "avx2").source("prefill")
    assert not re.search(r"find_seen|apply_score|param_|u\.args|u\.first|sink|rotate", plain)
