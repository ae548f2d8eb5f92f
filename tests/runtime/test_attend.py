"""build_step and attend: what goes where in a ragged batch, against float64 attention of each request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.passes.validate import load_spec
from kvgen.reference.attend import attend as exact_rows
from kvgen.reference.terms import Terms
from kvgen.runtime.attend import attend
from kvgen.runtime.layers import Layer, new_layers
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import DECODE_ROWS, Rows, Step, build_step
from tests.support.engines import engine_params, library
from tests.support.specs import make_spec
from tests.support.tiny_engine import poison
from tests.support.tiny_model import SPEC, exact_attention

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWED = make_spec("f32", "f32", "nhd", page_size=4, kv_heads=2, group=2, head_dim=16, mask=(True, 5))
HALF = make_spec("f32", "f32", page_size=4, kv_heads=2, group=2, head_dim=16, q_dtype="bf16")


def new_store(lib: Any, pages: int = 64) -> PageStore:
    store = PageStore(new_layers(lib, pages, layers=1))
    poison(store.layers)
    return store


class Batch:
    """Requests of ``shape`` = (keys before the step, rows in the step), their pages interleaved."""

    def __init__(self, lib: Any, *shape: tuple[int, int], pages: int = 64) -> None:
        att, self.shape = lib.spec.attention, shape
        g = torch.Generator().manual_seed(len(shape))
        self.store = new_store(lib, pages)
        self.layer = self.store.layers[0]
        self.sequences = [PagedSequence(self.store) for _ in shape]
        self.kv = [torch.randn(2, sum(s), att.kv_heads, att.head_dim, generator=g) for s in shape]
        self.q = [torch.randn(n, att.q_heads, att.head_dim, generator=g) for _, n in shape]
        for at in range(0, max(old for old, _ in shape), 3):
            for (old, _), sequence, kv in zip(shape, self.sequences, self.kv, strict=True):
                if count := min(3, old - at) if at < old else 0:
                    sequence.reserve(count)
                    slots = build_step([Rows(sequence, [0] * count, False)]).slots_T
                    lib.append(self.layer.cache, *kv[:, at : at + count], slots)

    def step(self) -> Step:
        for sequence, (_, rows) in zip(self.sequences, self.shape, strict=True):
            sequence.reserve(rows)
        return build_step(
            [Rows(s, [0] * n, False) for s, (_, n) in zip(self.sequences, self.shape, strict=True)]
        )

    def attend(self, step: Step, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
        kv = torch.cat([kv[:, old:] for kv, (old, _) in zip(self.kv, self.shape, strict=True)], 1)
        return attend(self.layer, torch.cat(self.q).to(dtype), *kv, step, **options)

    def exact(self) -> torch.Tensor:
        both = zip(self.q, self.kv, strict=True)
        return torch.cat([exact_attention(self.layer.library.spec, q, *kv) for q, kv in both])


SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode": ((3, 1), (0, 1), (8, 1)),
    "few rows": ((5, 2), (0, DECODE_ROWS), (4, 1)),
    "prefill": ((0, 9), (7, 12)),
    "mixed": ((6, 1), (2, 5), (0, DECODE_ROWS + 1), (5, 11)),
    "few rows last": ((6, 1), (0, 9), (3, 2)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("engine", engine_params(("portable", "avx2", "avx512-bf16")))
def test_each_request_sees_its_own_keys_only(engine: str, shape: tuple[tuple[int, int], ...]) -> None:
    batch = Batch(library(engine, SPEC), *shape)
    torch.testing.assert_close(batch.attend(batch.step()).double(), batch.exact(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_row_has_a_window_of_its_own(shape: tuple[tuple[int, int], ...]) -> None:
    batch = Batch(library("portable", WINDOWED), *shape)
    torch.testing.assert_close(batch.attend(batch.step()).double(), batch.exact(), rtol=0, atol=1e-5)


def test_the_interpreted_kernels_agree() -> None:
    batch = Batch(library("interpret", SPEC), (2, 1), (0, 9))
    torch.testing.assert_close(batch.attend(batch.step()).double(), batch.exact(), rtol=0, atol=1e-5)


def test_line_21_a_whole_prompt_beside_one_with_400_cached_keys() -> None:
    batch = Batch(library("portable", SPEC), (0, 1000), (400, 100), pages=400)
    torch.testing.assert_close(batch.attend(batch.step()).double(), batch.exact(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name, without", [("decode", [True]), ("few rows", [False]), ("prefill", [])])
def test_decode_takes_starts_only_where_a_request_has_several_rows(
    name: str, without: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, starts = Batch(library("portable", SPEC), *SHAPES[name]), []
    lib = batch.layer.library
    decode = lib.decode

    def spy(*args: Any, **options: Any) -> Any:
        starts.append(args[4])
        return decode(*args, **options)

    monkeypatch.setattr(lib, "decode", spy)
    batch.attend(batch.step())
    assert [given is None for given in starts] == without


def test_what_stands_behind_a_requests_pages_means_nothing() -> None:
    batch = Batch(library("portable", SPEC), *SHAPES["mixed"])
    step = batch.step()
    for row, sequence in zip(step.page_table_BP, batch.sequences, strict=True):
        row[sequence.num_pages :] = -(2**31)
    torch.testing.assert_close(batch.attend(step).double(), batch.exact(), rtol=0, atol=1e-5)


def test_q_is_cast_to_the_specs_type_and_back() -> None:
    batch = Batch(library("portable", HALF), *SHAPES["mixed"])
    out = batch.attend(batch.step())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), batch.exact(), rtol=0, atol=0.05)
    assert not torch.allclose(out.double(), batch.exact(), rtol=0, atol=1e-5), "bf16 leaves a trace"


def test_a_scale_replaces_the_specs() -> None:
    one, two = (Batch(library("portable", SPEC), *SHAPES["mixed"]) for _ in range(2))
    two.q = [q / 2 for q in two.q]
    out = one.attend(one.step(), scale=SPEC.attention.scale / 2)
    torch.testing.assert_close(out.double(), two.exact(), rtol=0, atol=1e-5)


def of_spec(**attention: Any) -> Any:
    table = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "q_dtype": "f32", **attention}
    cache = {"page_size": 4, "layout": "page kv head tok d", "k": {"format": "f32"}, "v": {"format": "f32"}}
    return load_spec({"attention": table, "cache": cache})


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_of_requests_and_rows_go_with_their_part(shape: tuple[tuple[int, int], ...]) -> None:
    """A mask by request and a term by row, of the whole step: each op gets those of its own part."""
    dims = {"first": {"dims": ["batch"], "dtype": "i32"}, "slope": {"dims": ["q", "head"], "dtype": "f32"}}
    spec = of_spec(
        mask="kv_pos >= first[batch]",
        score="score - slope[q_row, head] * abs(q_pos - kv_pos)",
        params=dims,
    )
    batch = Batch(library("portable", spec), *shape)
    g = torch.Generator().manual_seed(0)
    rows = sum(n for _, n in shape)
    first = torch.tensor([min(at, old) for at, (old, _) in enumerate(shape)], dtype=torch.int32)
    params = {"first": first, "slope": torch.rand(rows, 4, generator=g)}
    got = batch.attend(batch.step(), params=params)
    terms = Terms(spec.attention, {name: tensor.numpy() for name, tensor in params.items()})
    k, v = ([kv[side].numpy() for kv in batch.kv] for side in (0, 1))
    starts = [0, *itertools.accumulate(n for _, n in shape)]
    q = torch.cat(batch.q).numpy()
    want, _ = exact_rows(q, k, v, q_starts=starts, scale=spec.attention.scale, terms=terms)
    torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stored", ["post", "pre"])
def test_keys_that_the_kernels_rotate(stored: str) -> None:
    lib = library("portable", of_spec(rope={"stored": stored}))
    batch = Batch(lib, (0, 1), (0, 5), (0, 12))
    table = lib.rope_table(16)
    got = batch.attend(batch.step(), params={"rope_table": table})
    cos, sin = table.double().chunk(2, -1)
    for kv in batch.kv:
        n = kv.shape[1]
        one, two = kv[0].double().chunk(2, -1)
        c, s = cos[:n, None], sin[:n, None]
        kv[0] = torch.cat([one * c - two * s, one * s + two * c], -1)
    torch.testing.assert_close(got.double(), batch.exact(), rtol=0, atol=1e-5)


def test_foreign_caches_are_refused() -> None:
    batch = Batch(library("portable", SPEC), *SHAPES["decode"])
    batch.layer = Layer(library("portable", WINDOWED), batch.layer.cache)
    with pytest.raises(ArgumentError, match="use the library that made it"):
        batch.attend(batch.step())


def test_what_a_step_holds() -> None:
    store = new_store(library("portable", SPEC))
    one, two, three = (PagedSequence(store) for _ in range(3))
    one.reserve(5)  # pages 0, 1
    two.reserve(2)  # page 2
    one.reserve(4)  # page 3
    three.reserve(9)  # pages 4, 5, 6
    step = build_step([Rows(one, [7], True), Rows(two, [8, 9], False), Rows(three, list(range(9)), True)])
    assert step.tokens_T.tolist() == [7, 8, 9, *range(9)]
    assert step.positions_T.tolist() == [8, 0, 1, *range(9)]
    assert step.slots_T.tolist() == [12, 8, 9, *range(16, 25)]
    assert step.page_table_BP.shape == (3, 16)  # the longest has 3, rounded up
    assert [row.tolist()[:n] for row, n in zip(step.page_table_BP, (3, 1, 3), strict=True)] == [
        [0, 1, 3],
        [2],
        [4, 5, 6],
    ]
    assert step.kv_lens_B.tolist() == [9, 2, 9]
    assert step.q_starts_B1.tolist() == [0, 1, 3, 12]
    assert (step.num_decode, step.decode_rows) == (2, 3)
    assert step.last_rows_S.tolist() == [0, 11]
    int64, int32 = [step.tokens_T, step.positions_T, step.slots_T, step.last_rows_S], [step.page_table_BP]
    assert {t.dtype for t in int64} == {torch.int64}
    assert {t.dtype for t in [*int32, step.kv_lens_B, step.q_starts_B1]} == {torch.int32}
