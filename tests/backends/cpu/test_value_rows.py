"""Decode and prefill of formats without operands of their own: a V inside K of two segments, rope on read,
rotations, means, 8-bit queries, a direct side beside one of values; raw rows each way.

Against the oracle in hostile memory, one translation unit for each CPU row. Codecs: ``tests/codecs``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from tests.support.bundle import prepare
from tests.support.engines import cpu_library, engine_params
from tests.support.guard import run_guarded
from tests.support.variants import VariantCase, check_variant, wanted_kernels

ROW = {"head": 1, "tok": 1}
INT4 = {"format": "int4", "affine": True, "group": ROW | {"d": 16}, "scale_dtype": "bf16"}
CHANNEL = {"format": "int2", "affine": True, "group": {"head": 1, "tok": 16, "d": 1}}
LATENT = {
    "segments": [
        {"size": 64, "format": "int8", "affine": True, "group": ROW | {"d": 32}},
        {"size": 16, "format": "bf16"},
    ]
}
INT8 = {"format": "int8", "group": ROW}


def spec(name: str, cache: dict[str, Any], **attention: Any) -> Spec:
    shape = {"q_heads": 6, "kv_heads": 2, "head_dim": 64, "q_dtype": "bf16"}
    return load_spec(
        {"name": name, "attention": shape | attention, "cache": {"page_size": 32} | cache},
    )


SPECS = [
    spec(
        "latent", {"keep_last": 9, "keep_first": 3, "k": LATENT, "v": {"alias": "k"}},
        head_dim=80, v_head_dim=64, kv_heads=1, q_heads=5, window=33,
    ),
    spec(
        "rope-pre-channel", {"k": CHANNEL, "v": INT4, "keep_last": 20},
        rope={"kind": "default", "stored": "pre"}, soft_cap=20.0,
    ),
    spec(
        "mean-rotated", {"k": INT4 | {"mean": True, "transform": "hadamard"},
                         "v": INT4 | {"transform": "hadamard"}, "keep_first": 4},
        q_dtype="f16", window=33,
    ),
    spec("mean-int8", {"k": INT8 | {"mean": True}, "v": INT8 | {"scale_dtype": "f16"}}, qk="int8"),
    spec("beside-direct", {"k": INT8, "v": {"format": "lloyd3", "group": ROW, "transform": "hadamard"}}),
]  # fmt: skip


CHOSEN = {"avx512-bf16": SPECS, "avx2": SPECS[::2], "portable": SPECS[1::2]}


@pytest.mark.parametrize("row", engine_params(tuple(CHOSEN)))
def test_values_are_attended_to(row: str) -> None:
    cases = [VariantCase(found, seed, most=150, most_q=20) for seed, found in enumerate(CHOSEN[row])]
    libraries = [cpu_library(case.spec, row) for case in cases]
    prepare((lib, wanted_kernels(case)) for lib, case in zip(libraries, cases, strict=True))
    for lib, case in zip(libraries, cases, strict=True):
        run = run_guarded(functools.partial(check_variant, lib, case), timeout_s=120)
        assert run.ok, f"{case.spec.name} died by {run.signal}: {run.error}"
        assert run.value == [], case.spec.name
