"""new_cache and adopt: static scales, layers, foreign strides, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.errors import ArgumentError
from tests.support.engines import library
from tests.support.oracle import OracleLibrary
from tests.support.specs import make_spec

NHD = make_spec("bf16", "bf16", layout="two-pools-nhd", page_size=8, kv_heads=2, group=2, head_dim=64)


def exercise(lib: Any, cache: Any, seed: int = 0) -> list[torch.Tensor]:
    """Append and decode on a few scattered pages; the results, for comparison with another cache's."""
    generator = torch.Generator().manual_seed(seed)
    att, page = lib.spec.attention, lib.spec.cache.page_size
    pages = torch.randperm(cache.num_pages, generator=generator)[:3].int()
    n = 2 * page + 3
    slots = torch.tensor([int(pages[t // page]) * page + t % page for t in range(n)])
    k, v = (torch.randn(n, att.kv_heads, d, generator=generator) for d in (att.head_dim, att.v_head_dim))
    q = torch.randn(1, att.q_heads, att.head_dim, generator=generator)
    lib.append(cache, k, v, slots)
    table, lens = pages[None], torch.tensor([n], dtype=torch.int32)
    return [*lib.decode(q, cache, table, lens), *lib.gather(cache, table, lens)]


def assert_same(lib: Any, cache: Any, own: Any = None) -> None:
    """``cache`` behaves as a cache of the library's own does."""
    own = own or lib.new_cache(cache.num_pages)
    for got, want in zip(exercise(lib, cache), exercise(lib, own), strict=True):
        assert torch.equal(got, want)


def test_line_18_views_of_one_five_dimensional_tensor() -> None:
    """vLLM's (2, pages, tokens, heads, d) and the interleaved (pages, 2, tokens, heads, d)."""
    lib = library("portable", NHD)
    halves = torch.zeros(2, 12, 8, 2, 64, dtype=torch.bfloat16)
    assert_same(lib, lib.adopt(k=halves[0], v=halves[1]))
    interleaved = torch.zeros(12, 2, 8, 2, 64, dtype=torch.bfloat16)
    assert not interleaved[:, 0].is_contiguous()
    assert_same(lib, lib.adopt(k=interleaved[:, 0], v=interleaved[:, 1]))


def test_line_18_k_and_v_with_different_page_strides() -> None:
    lib = library("portable", NHD)
    k = torch.full((12, 3, 8, 2, 64), float("nan"), dtype=torch.bfloat16)[:, 1]
    v = torch.full((24, 8, 2, 64), float("nan"), dtype=torch.bfloat16)[::2]
    assert k.stride(0) != v.stride(0)
    assert_same(lib, lib.adopt(k=k, v=v))


def test_line_22_padded_pages_with_scales() -> None:
    """Hundreds of pages whose stride exceeds the product of the shape; scales lie behind the data."""
    spec = make_spec("int8-token", "int8-token", page_size=16, kv_heads=2, group=2, head_dim=64)
    lib = library("portable", spec)
    pages, page_bytes = 600, 2 * 16 * 2 * (64 + 4) + 320
    slab = torch.full((pages * page_bytes,), 255, dtype=torch.uint8)
    planes, at = {}, 64
    for name, width, dtype in (("k", 64, torch.int8), ("k_scale", 4, torch.float32)):
        for side in ("k", "v"):
            full = name.replace("k", side, 1)
            step = dtype.itemsize
            shape = (pages, 2, 16, 64) if width == 64 else (pages, 2, 16)
            strides = (page_bytes // step, 16 * width // step, width // step, 1)[: len(shape)]
            strides = strides if width == 64 else (page_bytes // 4, 16, 1)
            planes[full] = slab.view(dtype).as_strided(shape, strides, at // step)
            at += 2 * 16 * width
    assert_same(lib, lib.adopt(**planes))
    untouched = slab.view(pages, page_bytes)
    assert (untouched[:, :64] == 255).all() and (untouched[:, at:] == 255).all()


def test_every_layout_can_be_adopted() -> None:
    from tests.support.specs import LAYOUTS
    from tests.support.world import World

    for name in LAYOUTS:
        spec = make_spec("int8-token", "f16", layout=name, page_size=8, kv_heads=2, group=2, head_dim=64)
        lib = OracleLibrary(spec)
        exercise(lib, World(lib, 9).cache)
        assert_same(lib, World(lib, 9).cache)


def planes(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {s: torch.zeros(4, 8, 2, 64, dtype=torch.bfloat16) for s in "kv"}
    return {name: tensor for name, tensor in (found | changes).items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": None}, r"v: missing; adopt\(\) needs k, v"),
        ({"k_scale": torch.zeros(1)}, r"k_scale = \.\.\.: this cache has no such plane; it has k, v"),
        ({"k": torch.zeros(4, 8, 2, 64)}, r"k: dtype torch\.float32, but the spec stores bf16"),
        ({"k": torch.zeros(4, 2, 8, 64).bfloat16()}, r"k: shape \(4, 2, 8, 64\), but axes 'page tok head d'"),
        ({"k": torch.zeros(4, 8, 2).bfloat16()}, r"k: shape \(4, 8, 2\), but its axes are 'page tok head d'"),
        ({"k": torch.zeros(8).bfloat16()}, r"k: shape \(8,\), but its axes"),
        ({"k": [1.0]}, r"k = \[1\.0\]: give a torch tensor"),
        ({"v": torch.zeros(5, 8, 2, 64).bfloat16()}, r"v: 5 pages, but another plane has 4"),
        ({s: torch.zeros(0, 8, 2, 64).bfloat16() for s in "kv"}, r"k: no pages"),
        ({"k": torch.zeros(4, 2, 8, 64).bfloat16().transpose(1, 2)},
         r"k: stride 512 of axis head, but the layout puts 64 elements between steps"),
        ({"k": torch.zeros(1, 8, 2, 64).bfloat16().expand(4, 8, 2, 64)}, r"k: stride 0 of axis page; steps"),
        ({"k": torch.zeros(9000).bfloat16().as_strided((4, 8, 2, 64), (512, 128, 64, 1))},
         r"k: stride 512 is below the 1024 elements it steps over: overlap"),
        ({"k": torch.zeros(4, 8, 2, 64, device="meta").bfloat16()}, r"v: on cpu, but k is on meta"),
    ],
)  # fmt: skip
def test_adopt_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        library("portable", NHD).adopt(**planes(**changes))


def test_an_address_off_the_element_is_refused() -> None:
    raw = np.zeros(2 * 4096 + 1, np.uint8)[1:]
    k = torch.from_numpy(raw.view(np.int16).reshape(4, 8, 2, 64)).view(torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"k: starts at an address that is no multiple of 2 bytes"):
        library("portable", NHD).adopt(**planes(k=k))


class TestStaticScales:
    SPEC = make_spec("int8-head", "int8-tensor", page_size=4, kv_heads=2, head_dim=16)

    @pytest.mark.parametrize(
        ("scales", "message"),
        [
            (None, r"scales\['k'\]: missing; .*give 2 positive f32 scales, one a KV head"),
            ({"k": torch.ones(2)}, r"scales\['v'\]: missing; .*give one positive f32 scale"),
            ({"k": torch.ones(3), "v": 1.0}, r"scales\['k'\]: 3 values, but the spec has 2"),
            ({"k": torch.ones(2), "v": 0.0}, r"scales\['v'\] = \[0\.0\]: every scale must be finite"),
            ({"k": torch.tensor([1, torch.nan]), "v": 1.0}, r"scales\['k'\] = .*every scale must be finite"),
            ({"k": torch.ones(2), "v": 2.0**-101}, r"scales\['v'\] = .*at least 2\*\*-100"),
            ({"k": torch.ones(2), "v": 3e38}, r"scales\['v'\] = .*times 127, .*at most 2\.68e\+36"),
            ({"k": torch.ones(2), "v": 1.0, "q": 1.0}, r"scales\['q'\]: give scales for 'k' and 'v'"),
        ],
    )
    def test_refused(self, scales: Any, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            library("portable", self.SPEC).new_cache(2, scales=scales)

    def test_surplus_scales_are_refused(self) -> None:
        with pytest.raises(ArgumentError, match=r"scales\['k'\]: bf16 here has no static scales"):
            library("portable", NHD).new_cache(2, scales={"k": torch.ones(2)})

    def test_line_16_scales_apply_on_every_path(self) -> None:
        """Codes 4 and 2 with scales 0.25 and 0.5 are 1 and 1: both scales honoured by every reader."""
        lib = library("portable", self.SPEC)
        cache = lib.new_cache(2, scales={"k": [0.25, 0.25], "v": 0.5})
        rows = torch.ones(3, 2, 16)
        lib.append(cache, rows, rows, torch.arange(3))
        assert (cache.k[0, :, :3] == 4).all() and (cache.v[0, :, :3] == 2).all()
        table, lens, starts = torch.zeros(1, 1).int(), torch.tensor([3]).int(), torch.tensor([0, 1]).int()
        expected = 16 * 16**-0.5 * 1.4426950408889634 + torch.log2(torch.tensor(3.0)).item()
        q = torch.ones(1, 2, 16)
        for out, lse in (
            lib.decode(q, cache, table, lens),
            lib.decode(q, cache, table, lens, starts),
            lib.prefill(q, cache, table, lens, starts),
        ):
            assert (out == 1).all()
            torch.testing.assert_close(lse, torch.full((1, 2), expected), rtol=1e-6, atol=0)
        assert all((t == 1).all() for t in lib.gather(cache, table, lens))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3"])
def test_counts_are_positive_integers(value: Any) -> None:
    lib = library("portable", NHD)
    with pytest.raises(ArgumentError, match="num_pages = "):
        lib.new_cache(value)
    with pytest.raises(ArgumentError, match="layers = "):
        lib.new_cache(2, layers=value)


def test_layers_share_ids_and_nothing_else() -> None:
    lib = library("portable", NHD)
    first = lib.new_cache(4, layers=3)
    assert len(first.layers) == 3 and first.layers[0] is first
    for i, layer in enumerate(first.layers):
        layer.k.fill_(i + 1)
    assert [float(layer.k.max()) for layer in first.layers] == [1, 2, 3]
    with pytest.raises(AttributeError, match="this cache has no 'k_scale'; it has k, v"):
        _ = first.k_scale


def test_planes_are_written_into_and_not_replaced() -> None:
    cache = OracleLibrary(make_spec()).new_cache(2)
    with pytest.raises(AttributeError, match="where the kernels read and write; write into it"):
        cache.k = torch.zeros(1)
    with pytest.raises(ArgumentError, match="make another with new_cache"):
        copy.deepcopy(cache)


def test_a_library_says_what_it_is() -> None:
    words = repr(library("portable", make_spec("bf16", "int8-token", head_dim=64)))
    assert "2 query and 2 KV heads of 64, K bf16, V int8, pages of 16" in words
