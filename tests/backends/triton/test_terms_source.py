"""Sources of variants: full tiles without masks, no tile in vain, no second load of V; and refusals."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgen.errors import UnsupportedError
from kvgen.ir import Spec
from tests.support.specs import FORMAT_TABLES
from tests.support.triton_calls import BACKEND, plan
from tests.support.triton_specs import LATENT, deepseek, llama, unturned, variant_spec

MASKS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": 33},
    {"causal": False, "window": 33, "window_right": 20},
    {"chunk": 40},
    {"causal": False, "prefix_lm": True},
    {"document": True},
    {"kv_first": True},
    {"mask": "kv_pos < 3 or q_pos - kv_pos <= 40"},
    {"causal": False, "tree": True},
]
OPS = [("decode", "single"), ("decode", "multi"), ("prefill", "")]


def source(op: str, spec: Spec, variant: str = "", target: str = "sm_90", **knobs: Any) -> str:
    return BACKEND.render(plan(op, spec, target, variant, **knobs))


def loops(text: str) -> list[str]:
    """The loops over tiles of the first kernel, each from its head to the next blank line."""
    kernel = text.split("@triton.jit")[-2 if "def merge_splits" in text else -1]
    return re.findall(r"    for tile in (?:.*\n)+?\n", kernel.split("    if wild > 0:")[0] + "\n")


@pytest.mark.parametrize(("op", "variant"), OPS)
@pytest.mark.parametrize("keys", MASKS, ids=str)
def test_a_full_tile_is_that_of_full_attention(keys: dict[str, Any], op: str, variant: str) -> None:
    knobs = {"rows": 64} if op == "prefill" else {}
    (body,) = (x for x in loops(source(op, llama(**keys), variant, **knobs)) if "body_lo, body_hi" in x)
    (plain,) = (
        x for x in loops(source(op, llama(causal=False), variant, **knobs)) if "body_lo, body_hi" in x
    )
    assert body == plain
    assert "seen" not in body and "mask=" not in body


@pytest.mark.parametrize(("op", "variant"), OPS)
def test_where_no_tile_is_full_there_is_one_loop_and_it_is_pipelined(op: str, variant: str) -> None:
    (only,) = loops(source(op, llama(causal=False, bool_mask="bits"), variant))
    assert "tl.range(kv_lo, kv_hi, TILE):" in only


def test_what_depends_on_the_row_or_the_request_is_loaded_before_the_loops() -> None:
    spec = llama(window=9, kv_first=True, head_scale=True, alibi=True, document=True)
    text = source("prefill", spec)
    first = text.index("    for tile in")
    for name in ("kv_first_ptr", "head_scale_ptr", "tl.exp2(-8.0", "param_doc_start_M = "):
        assert text.index(name) < first and text.count(name) <= 2, name
    assert all("param_doc_start_T" in x for x in loops(text) if "body_lo, body_hi" not in x)


def seen(keys: dict[str, Any], q_pos: Any, kv_pos: Any, kv_len: int, kv_first: int) -> Any:
    """bool [q, kv] of the masks in ``EXACT``."""
    found = (kv_pos < kv_len) & (kv_pos >= (kv_first if keys.get("kv_first") else 0))
    if keys.get("causal", True):
        found = found & (kv_pos <= q_pos)
    if "window" in keys:
        found = found & (kv_pos >= q_pos - keys["window"])
    if "window_right" in keys:
        found = found & (kv_pos <= q_pos + keys["window_right"])
    return found & (kv_pos // keys["chunk"] == q_pos // keys["chunk"]) if "chunk" in keys else found


EXACT = [keys for keys in MASKS if not {"mask", "tree", "document", "prefix_lm"} & set(keys)]


@pytest.mark.parametrize("keys", EXACT, ids=str)
def test_no_tile_is_visited_in_vain_and_none_is_left_out(keys: dict[str, Any]) -> None:
    """The ranges of a rendered prefill, computed for many calls and held against every (query, key)."""
    built = plan("prefill", variant_spec(**keys), "sm_90", rows=16, tile=16)
    text = BACKEND.render(built)
    lines = re.search(r"    kv_lo = [^$]*?(?=    table_row)", text)
    positions = re.findall(r"    (?:first|last)_pos = .*\n", text)
    assert lines is not None
    code = compile(re.sub("(?m)^    ", "", "".join(positions) + lines.group()), "ranges", "exec")
    tl = SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b))
    rng = np.random.default_rng(0)
    for _ in range(150):
        q_len, kv_len, kv_first = (int(n) for n in rng.integers((1, 0, 0), (60, 200, 120)))
        row_tile = int(rng.integers(0, -(-q_len * 2 // 16)))
        names: dict[str, Any] = {c.name: c.value for c in built.constants}
        names |= {"tl": tl, "kv_len": kv_len, "q_len": q_len, "row_tile": row_tile}
        names |= {"param_kv_first_b": kv_first, "floor_div": lambda a, b: a // b}
        exec(code, names, found := dict[str, Any]())  # noqa: S102 - four lines that we rendered
        rows = np.arange(row_tile * 8, min(q_len, row_tile * 8 + 8))[:, None] + kv_len - q_len
        pairs = seen(keys, rows, np.arange(224)[None, :], kv_len, kv_first)
        some, every = pairs.reshape(len(rows), 14, 16).any((0, 2)), pairs.reshape(-1, 14, 16).all((0, 2))
        lo, hi = found["body_lo"] // 16, found["body_hi"] // 16
        last = -(-found["kv_hi"] // 16)
        visited = {*range(found["kv_lo"] // 16, lo), *range(hi, last)}
        assert every[lo:hi].all(), "an unmasked tile that some row does not see"
        assert set(np.flatnonzero(some)) <= visited | set(range(lo, hi)), "a tile is left out"
        if found["kv_lo"] < found["kv_hi"]:
            assert some[list(visited)].all(), "an empty tile is visited"


def test_v_inside_k_is_loaded_with_k_and_once() -> None:
    for op, variant in OPS:
        text = source(op, deepseek(), variant)
        assert "v_ptr" not in text and "v_stride" not in text
        for loop in loops(text):
            assert loop.count("tl.reshape(k_") + loop.count("tl.load(k_") == 2 and "v0_TD = k0_TD" in loop


INT8_ROWS = FORMAT_TABLES["int8-token"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"v": LATENT, "rope": unturned(pairing="half")}, 'cache.v.alias: .* "post" works'),
        (
            {"k": "int8-block", "rope": unturned(pairing="half")},
            "scales for 16 elements .* a scale for each row",
        ),
        (
            {"k": "int4-token", "rope": unturned(pairing="interleaved")},
            'only pairing = "half" with dim = head_dim',
        ),
        ({"k": "int8-token", "qk": "int8", "rope": unturned(pairing="half")}, 'qk = "exact"'),
        ({"k": "int8-token", "v": LATENT, "qk": "int8"}, 'use qk = "exact"'),
    ],
    ids=["alias", "blocks", "nibbles", "int8 dot", "latent int8 dot"],
)
def test_what_cannot_be_is_refused_before_compile(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan("decode", variant_spec(**keys), "sm_90")


def test_a_prefix_of_positional_masks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="window"):
        plan("decode", variant_spec(window=33), "sm_90", "prefix")
