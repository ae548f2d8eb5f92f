"""Masks, scores, sinks, rotated keys and a V inside K in CPU decode, over panels and rows of the widest row.

``tests/conformance/test_variants.py`` crosses them with layouts and formats on the other rows.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from kvgen import reference
from kvgen.ir import Spec
from kvgen.reference.terms import Terms
from kvgen.variants.samples import sample_params
from tests.support.bundle import prepare
from tests.support.compare import attention
from tests.support.engines import cpu_library
from tests.support.guard import run_guarded
from tests.support.oracle import to_numpy
from tests.support.variants import angles, placed, variant_spec
from tests.support.world import HUGE_IDS, World, poisoned

LENS = [300, 3, 0, 129, 64, 1, 15, 16, 17, 5]
Q_LENS = [5, 3, 2, 8, 1, 1, 4, 0, 2, 8]
SPLITS = {"decode": {"split_tokens": 64, "tile": 16, "heads": 1}}

pytestmark = [pytest.mark.isa("avx512"), pytest.mark.isa("bf16"), pytest.mark.isa("vnni")]


def spec_of(fmt: str, layout: str, q_dtype: str, **more: Any) -> Spec:
    shape = {"kv_heads": 2, "group": 3, "head_dim": 64} | more
    return variant_spec(format_k=fmt, format_v=fmt, layout=layout, q_dtype=q_dtype, **shape)


SPECS = {
    "window": spec_of("bf16", "hnd", "bf16", mask="window", score="soft_cap", sink=True),
    "document": spec_of("bf16", "pairs", "bf16", mask="document", score="alibi"),
    "chunk": spec_of("int8-token", "quads", "bf16", mask="chunk", score="head_scale", head_dim=72),
    "tree": spec_of("int4-token", "quads", "bf16", mask="tree", score="soft_cap", sink=True),
    "bool": spec_of("int8-block", "quads", "f16", mask="bool_mask", score="score"),
    "kv_first": spec_of("f16", "columns", "f16", mask="kv_first", score="alibi", group=5),
    "prefix": spec_of("e4m3-token", "columns", "bf16", mask="prefix_lm", sink=True, page_size=32),
    "own": spec_of("f32", "hnd", "f32", mask="mask", score="head_scale", rope="pre half"),
    "latent": spec_of("bf16", "hnd", "bf16", alias=True, score="soft_cap", kv_heads=1, group=16, head_dim=96),
    "pre": spec_of("int4-token", "quads", "bf16", mask="window", rope="pre interleaved"),
}
"""What meets what: every form of K and V, masked tiles, terms of rows and of keys, K turned when read."""

TIGHT = ("window", "document", "chunk", "kv_first", "prefix", "pre")
"""Those whose bounds leave out every page that nobody sees."""


@pytest.fixture(scope="module")
def libraries() -> dict[str, Any]:
    """A library for each of ``SPECS``."""
    found = {name: cpu_library(spec, ROW, SPLITS) for name, spec in SPECS.items()}
    wanted = [(lib, [("decode", "single"), ("decode", "multi")]) for lib in found.values()]
    prepare([*wanted, (found["latent"], [("decode", "prefix")])])
    return found


ROW = "avx512-bf16-vnni"


class Scene:
    """A filled cache, a page table, queries and parameters that cover no more than what is read."""

    def __init__(self, lib: Any, lens: list[int] = LENS, q_lens: list[int] = Q_LENS) -> None:
        self.lib, self.spec, self.lens = lib, lib.spec, lens
        page, att = self.spec.cache.page_size, self.spec.attention
        self.world = World(lib, sum(-(-n // page) for n in lens) + 3)
        self.table = self.world.table(lens)
        slots = self.world.slots(self.table, lens)
        k, v = (
            self.world.normal(len(slots), att.kv_heads, width) for width in (att.head_dim, att.v_head_dim)
        )
        where = (self.spec, self.world.record, self.world.bytes, self.world.num_pages)
        values = None if self.spec.cache.alias else v.numpy()
        reference.append(*where, k.numpy(), values, np.array(slots))
        self.where, self.rng = where, np.random.default_rng(0)
        self.starts = [0, *accumulate(q_lens)]
        self.q = self.world.query(self.starts[-1])
        self.params = self.draw(self.starts)

    def draw(self, starts: list[int]) -> dict[str, np.ndarray]:
        """Parameters of a call."""
        found = sample_params(self.spec, kv_lens=self.lens, q_starts=starts, rng=self.rng, kv=max(self.lens))
        table = angles(self.spec, max(self.lens))
        return found if table is None else {**found, "rope_table": table}

    def oracle(self, q: torch.Tensor, starts: list[int], params: Any, **options: Any) -> Any:
        found = reference.prefill(
            *self.where, self.table.numpy(), self.lens, to_numpy(q), starts, params=params, **options
        )
        return tuple(map(torch.from_numpy, found))

    def run(self, variant: str, q: torch.Tensor, starts: list[int], params: Any, threads: int = 1) -> Any:
        """Out and lse of a kernel, everything that it touches ending at a guard page."""
        given = None if variant == "single" else self.world.ints(starts)
        args = (q, self.world.cache, self.table, self.world.ints(self.lens))
        ragged = () if given is None else (given,)
        tensors = placed(self.world, params) or None
        if variant == "prefix":
            outputs = self.world.outputs(len(q))
            call = (q, given, *args[2:], outputs["out"], outputs["lse"])
            return self.lib._attend("decode", "prefix", args[1], call, None, None, tensors, threads)
        nbytes = self.lib.workspace_bytes("decode", *args, *ragged, params=tensors, num_threads=threads)
        workspace = poisoned([max(nbytes, 1)], torch.uint8, "end", 64)
        outputs = self.world.outputs(len(q))
        return self.lib.decode(
            *args, *ragged, **outputs, params=tensors, workspace=workspace, num_threads=threads
        )


def hide_unseen_pages(scene: Scene, starts: list[int], params: Any) -> None:
    """Nonsense in the place of every page id of which no query of its request sees a key."""
    page, terms = scene.spec.cache.page_size, Terms(scene.spec.attention, params)
    for b, kv_len in enumerate(scene.lens):
        seen = terms.visible(b, starts[b], starts[b + 1] - starts[b], kv_len).any(axis=(0, 1))
        for at in range(-(-kv_len // page) if starts[b] < starts[b + 1] else 0):
            if not seen[at * page : (at + 1) * page].any():
                scene.table[b, at] = HUGE_IDS[at % len(HUGE_IDS)]


def wrong(lib: Any, name: str, variant: str) -> list[str]:
    """What differs from the oracle, and from the same call on two threads."""
    scene = Scene(lib)
    starts, q, params = scene.starts, scene.q, scene.params
    if variant == "single":
        starts = list(range(len(LENS) + 1))
        q, params = scene.world.query(len(LENS)), scene.draw(starts)
    want = scene.oracle(q, starts, params)
    if name in TIGHT:
        hide_unseen_pages(scene, starts, params)
    got = scene.run(variant, q, starts, params)
    again = scene.run(variant, q, starts, params, threads=2)
    found = attention(variant, got, want, scene.spec.attention.q_dtype)
    same = all(torch.equal(one, two) for one, two in zip(got, again, strict=True))
    return found if same else [*found, f"{variant}: other bits on two threads"]


@pytest.mark.parametrize("variant", ["single", "multi"])
@pytest.mark.parametrize("name", list(SPECS))
def test_terms_give_what_the_oracle_gives(libraries: dict[str, Any], name: str, variant: str) -> None:
    run = run_guarded(lambda: wrong(libraries[name], name, variant), timeout_s=120)
    assert run.ok, f"died by {run.signal}: touched forbidden memory\n{run.error}"
    assert not run.value, "\n".join(run.value)


@pytest.mark.parametrize("name", ["document", "tree"])
def test_bits_do_not_depend_on_the_batch(libraries: dict[str, Any], name: str) -> None:
    scene = Scene(libraries[name])
    whole = scene.run("multi", scene.q, scene.starts, scene.params)
    dims = {param.name: param.dims for param in scene.spec.attention.params}
    lens, table = scene.lens, scene.table
    for b, (first, end) in enumerate(zip(scene.starts[:-1], scene.starts[1:], strict=True)):
        cut = {"batch": slice(b, b + 1), "q": slice(first, end)}
        own = {
            key: values[tuple(cut.get(dim, slice(None)) for dim in dims[key])]
            for key, values in scene.params.items()
        }
        scene.lens, scene.table = lens[b : b + 1], table[b : b + 1]
        alone = scene.run("multi", scene.q[first:end], [0, end - first], own)
        for one, all_of_them in zip(alone, whole, strict=True):
            assert torch.equal(one, all_of_them[first:end]), f"request {b}"


def test_the_prefix_of_a_cascade_is_seen_by_all_and_has_no_sink(libraries: dict[str, Any]) -> None:
    scene = Scene(libraries["latent"], [77], [20])
    sees_all = dataclasses.replace(scene.spec.attention, causal=False)
    got = scene.run("prefix", scene.q, [0, 20], scene.params)
    scene.where = (dataclasses.replace(scene.spec, attention=sees_all), *scene.where[1:])
    want = scene.oracle(scene.q, [0, 20], scene.params, finalize=False)
    assert not (found := attention("prefix", got, want, "bf16")), "\n".join(found)


@pytest.mark.parametrize("name", list(SPECS))
def test_loops_over_keys_read_no_parameter_that_the_key_does_not_choose(
    libraries: dict[str, Any], name: str
) -> None:
    for variant in ("single", "multi"):
        source = libraries[name].source("decode", variant)
        loop = source[source.index("inline void attend_block(") : source.index("inline void segment(")]
        assert "a.param_" not in loop and "std::exp2" not in loop


def test_a_tile_that_is_never_full_has_no_other_code(libraries: dict[str, Any]) -> None:
    source = libraries["bool"].source("decode", "multi")
    assert "WHOLE>\ninline void attend_block" not in source and "full_range" not in source
    assert "template <bool MASKED>\ninline void segment" not in source
