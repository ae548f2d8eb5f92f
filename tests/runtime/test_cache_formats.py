"""Caches of every storage: planes and their types, scales and means that are given, raw rows, true bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvgen.builder import assemble
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec

ROW = {"head": 1, "tok": 1}
CHANNEL = {"head": 1, "tok": 8, "d": 1}


def spec_of(k: dict[str, Any], v: dict[str, Any] | None = None, **cache: Any) -> Spec:
    att = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "q_dtype": "bf16"}
    return load_spec(
        {"name": "x", "attention": att, "cache": {"page_size": 16, "k": k, "v": v or k, **cache}}
    )


KIVI = spec_of(
    {"format": "int2", "affine": True, "group": CHANNEL, "scale_dtype": "f16"},
    {"format": "int2", "affine": True, "group": ROW | {"d": 32}, "scale_dtype": "f16"},
    keep_last=32,
)
NVFP4 = spec_of({"format": "nvfp4", "outer": {"head": 1}}, {"format": "bf16"})
CENTRED = spec_of({"format": "int8", "group": ROW, "mean": True}, {"format": "e5m2", "group": {}})
PARTS = spec_of(
    {"segments": [{"size": 32, "format": "e4m3", "group": {}}, {"size": 32, "format": "bf16"}]},
    {"format": "int3", "affine": True, "group": ROW | {"d": 32}, "scales": "pool"},
)


@pytest.mark.parametrize(
    ("spec", "given", "types"),
    [
        (KIVI, {}, {"k": "uint8", "k_scale": "float16", "k_min": "float16", "k_raw": "bfloat16"}),
        (NVFP4, {"scales": {"k": [1.0, 2.0]}},
         {"k": "uint8", "k_scale": "float8_e4m3fn", "k_outer": "float32"}),
        (CENTRED, {"scales": {"v": 1.0}, "means": {"k": torch.ones(2, 64)}}, {"v": "float8_e5m2"}),
        (PARTS, {"scales": {"k": 1.0}},
         {"k": "float8_e4m3fn", "k1": "bfloat16", "v": "uint8", "v_top": "uint8"}),
        (spec_of({"format": "mxfp4"}), {}, {"k": "uint8", "k_scale": "uint8"}),
    ],
)  # fmt: skip
def test_planes_have_their_types_in_the_order_of_the_abi(
    spec: Spec, given: dict[str, Any], types: dict[str, str]
) -> None:
    from kvgen.passes.abi import plane_args

    lib = assemble(spec)
    cache = lib.new_cache(3, layers=2, **given).layers[1]
    for name, dtype in types.items():
        assert str(cache.planes[name].dtype) == f"torch.{dtype}"
    wanted = [arg.name for arg in plane_args(spec, lib.record)]
    assert set(wanted) == set(cache.arguments())
    assert list(cache.planes) == [name for name in wanted if "_stride_" not in name]


@pytest.mark.parametrize("spec", [KIVI, PARTS, spec_of({"format": "int3", "group": ROW, "scales": "inline"})])
def test_every_plane_can_be_adopted_by_itself(spec: Spec) -> None:
    lib = assemble(spec)
    scales = {"k": 0.5} if spec is PARTS else None
    cache = lib.new_cache(4, scales=scales)
    names = [plane.name for plane in (*lib.record.planes, *lib.record.raw)]
    planes = {name: cache.planes[name] for name in names} | (
        {"raw_rows": cache.raw_rows} if spec is KIVI else {}
    )
    twin = lib.adopt(scales=scales, **planes)
    assert list(twin.planes) == list(cache.planes)
    for name, tensor in planes.items():
        tensor.view(torch.uint8).fill_(7) if tensor.is_contiguous() else tensor.fill_(7)
        assert twin.planes[name].data_ptr() == tensor.data_ptr()
        assert twin.planes[name].stride() == tensor.stride()


def adopted(**changes: Any) -> dict[str, Any]:
    cache = assemble(KIVI).new_cache(4, raw_rows=2)
    return {name: tensor for name, tensor in (cache.planes | changes).items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw_rows": None}, r"raw_rows: missing; adopt\(\) needs k, k_scale, k_min, v, .*_raw, raw_rows"),
        ({"raw_rows": torch.zeros(3, dtype=torch.int32)},
         r"raw_rows: int32 \(3,\); give a contiguous int32 \(4,\)"),
        ({"raw_rows": torch.zeros(4, dtype=torch.int64)}, r"raw_rows: int64 \(4,\); give"),
        ({"v_raw": torch.zeros(3, 2, 16, 64).bfloat16()}, "v_raw: 3 raw rows, but another plane has 2"),
        ({"k_raw": torch.zeros(2, 2, 16, 64)}, r"k_raw: dtype torch\.float32, but the spec stores bf16"),
        ({"k_min": torch.zeros(4, 2, 2, 64)}, r"k_min: dtype torch\.float32, but the spec stores f16"),
    ],
)  # fmt: skip
def test_adopt_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        assemble(KIVI).adopt(**adopted(**changes))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (NVFP4, {}, r"scales\['k'\]: missing; the outer scale of k, .*: give 2 positive f32 scales"),
        (NVFP4, {"scales": {"k": [1.0, 0.0]}}, r"scales\['k'\] = .*every scale must be finite and at least"),
        (NVFP4, {"scales": {"k": [1.0, 2e35]}}, r"scales\['k'\] = .*times 2688, .*at most 1\.27e\+35"),
        (NVFP4, {"scales": {"k": [1.0, 1.0], "v": 1.0}}, r"scales\['v'\]: bf16 here has no static scales"),
        (PARTS, {"scales": {"k": 1.0, "k2": 1.0}}, r"scales\['k2'\]: give scales for 'k'"),
        (CENTRED, {"scales": {"v": 1.0}}, r"means\['k'\]: missing; give the mean of K, \(kv_heads, head"),
        (CENTRED, {"scales": {"v": 1.0}, "means": {"k": torch.ones(64)}},
         r"means\['k'\]: shape \(64,\), but the spec has \(2, 64\)"),
        (CENTRED, {"scales": {"v": 1.0}, "means": {"k": torch.full((2, 64), torch.nan)}},
         r"means\['k'\]: holds NaN or inf"),
        (CENTRED, {"scales": {"v": torch.tensor(1 + 1j)}}, r"scales\['v'\]: complex numbers; give real"),
        (CENTRED, {"scales": {"v": 1.0}, "means": {"k": torch.ones(2, 64) * 1j}},
         r"means\['k'\]: complex numbers; give real"),
        (CENTRED, {"scales": {"v": 1.0}, "means": {"k": 1.0}}, r"means\['k'\] = 1\.0: give a tensor"),
        (CENTRED, {"scales": {"v": 1.0}, "means": {"v": torch.ones(2, 64)}},
         r"means\['v'\]: only K has a mean"),
        (KIVI, {"means": {"k": torch.ones(2, 64)}}, r"means\['k'\]: this spec subtracts none"),
        (KIVI, {"means": 3}, r"means = 3: give a mapping"),
        (KIVI, {"raw_rows": 0}, r"raw_rows = 0: give 1 to 4 \(num_pages\) raw rows, or None"),
        (KIVI, {"raw_rows": 5}, r"raw_rows = 5: give 1 to 4"),
        (NVFP4, {"scales": {"k": [1.0, 1.0]}, "raw_rows": 2},
         "raw_rows = 2: every token becomes codes at once in this cache; leave raw_rows out"),
    ],
)  # fmt: skip
def test_new_cache_refuses(spec: Spec, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        assemble(spec).new_cache(4, **options)


def test_scales_and_means_of_all_layers_or_of_each() -> None:
    lib = assemble(CENTRED)
    means = torch.arange(3 * 2 * 64).reshape(3, 2, 64).double().requires_grad_()
    own = lib.new_cache(2, layers=3, scales={"v": [1.0, 2.0, 4.0]}, means={"k": means}).layers
    assert [float(cache.v_scale) for cache in own] == [1, 2, 4]
    assert all(torch.equal(cache.k_mean, means[at].float()) for at, cache in enumerate(own))
    assert not own[0].k_mean.requires_grad
    alike = lib.new_cache(2, layers=3, scales={"v": 3.0}, means={"k": means[1]}).layers
    assert all(float(cache.v_scale) == 3 and torch.equal(cache.k_mean, own[1].k_mean) for cache in alike)


def test_each_page_has_a_raw_row_unless_somebody_hands_them_out() -> None:
    lib = assemble(KIVI)
    first, second = lib.new_cache(5, layers=2).layers
    assert first.raw_rows.tolist() == [0, 1, 2, 3, 4] and first.k_raw.shape == (5, 2, 16, 64)
    assert second.raw_rows is first.raw_rows and second.k_raw.data_ptr() != first.k_raw.data_ptr()
    few = lib.new_cache(5, raw_rows=2)
    assert few.raw_rows.tolist() == [-1] * 5 and few.v_raw.shape == (2, 2, 16, 64)
    assert few.pools["raw"].nbytes == 2 * lib.footprint.raw_row


def test_the_new_planes_are_not_replaced_or_copied_away() -> None:
    cache = assemble(KIVI).new_cache(2)
    for name in ("k_min", "k_raw", "raw_rows"):
        with pytest.raises(AttributeError, match=f"cache.{name} is where the kernels read and write"):
            setattr(cache, name, torch.zeros(1))
    with pytest.raises(ArgumentError, match="make another with new_cache"):
        copy.deepcopy(cache)


@pytest.mark.parametrize(
    ("spec", "bits", "raw"),
    [
        # K: 2 bits and two f16 for 8 tokens of a channel; V: 2 bits and two f16 for 32 elements of a token.
        (KIVI, ((2 + 32 / 8) + (2 + 32 / 32)) / 2, 2 * 2 * 16 * 64 * 2),
        (spec_of({"format": "mxfp4"}), 4 + 8 / 32, 0),
        (spec_of({"format": "int3", "group": ROW}), 3 + 32 / 64, 0),
        (NVFP4, (4 + 8 / 16 + 16) / 2, 0),
    ],
)
def test_true_bytes(spec: Spec, bits: float, raw: int) -> None:
    found = assemble(spec).footprint
    assert found.code_bits == bits and found.raw_row == raw
    assert found.bits == 8 * assemble(spec).record.page_bytes() / 16 / found.elements >= bits
    pages = found.request_bytes(17) / found.token_bytes
    assert pages == 32 and found.request_bytes(17, 2) - found.request_bytes(17) == 2 * raw
