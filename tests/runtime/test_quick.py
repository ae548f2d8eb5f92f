"""Calls of shapes seen before: the same bits, the same refusals, though most checks are left out."""

from __future__ import annotations

import functools
import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvgen.errors import ArgumentError
from kvgen.runtime import quick
from tests.runtime.test_arguments import SPEC, Batch
from tests.support.engines import library
from tests.support.specs import make_spec


def filled() -> Batch:
    batch = Batch()
    noise = torch.Generator().manual_seed(7)
    for plane in batch.cache.planes.values():
        plane.normal_(generator=noise)
    batch.q.normal_(generator=noise)
    return batch


def remembered(batch: Batch) -> int:
    return len(batch.cache.calls._known)


@pytest.fixture(params=["guarded", "keyed"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch's guard, and as where torch has none: by keys alone."""
    if request.param == "keyed":
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    return str(request.param)


def warm(call: Callable[[], Any]) -> Any:
    """The first call is checked, the second is found by its key, all others by the guard."""
    call()
    call()
    return call()


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_second_call_takes_the_short_way(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    b = filled()
    first = getattr(b, op)()
    assert remembered(b) == 1
    monkeypatch.setattr(b.lib, "_attention", None)  # the long way is closed
    for _ in range(3):
        again = getattr(b, op)()
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_repeated_call_needs_no_key(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    b = filled()
    rows = torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), torch.tensor([3])
    out, lse = torch.empty(2, 4, 16), torch.empty(2, 4)
    for options in ({}, {"out": out}, {"lse": lse}, {"out": out, "lse": lse}, {"scale": 0.5}):
        warm(functools.partial(b.decode, **options))
    warm(lambda: b.lib.append(b.cache, *rows))
    monkeypatch.setattr(quick, "call_key", None)
    if way == "keyed":
        with pytest.raises(TypeError):
            b.decode(scale=0.5)
        return
    b.lib.append(b.cache, *rows)
    b.decode(scale=0.5)  # the last of its kind
    for options in ({"out": out}, {"lse": lse}, {"out": out, "lse": lse}):
        b.decode(**options)
    with pytest.raises(TypeError):
        b.decode()  # another scale than the last


def test_shapes_may_take_turns() -> None:
    b, c = filled(), filled()
    c.q, c.lens, c.table = c.q[:1] * 2, c.lens[:1], c.table[:1]
    want = [b.decode()[0], c.decode()[0]]
    for turn in range(6):
        one = (b, c)[turn % 2]
        found = b.lib.decode(one.q, b.cache, one.table, one.lens)[0]
        assert torch.equal(found, want[turn % 2])
    assert remembered(b) == 2


def test_thread_counts_may_take_turns() -> None:
    b = filled()
    want = b.decode()[0]
    for threads in (1, 2, 1, 2, 2):
        assert torch.equal(b.decode(num_threads=threads)[0], want)
    with pytest.raises(ArgumentError, match="num_threads"):
        b.decode(num_threads=True)
    with pytest.raises(ArgumentError, match="scale"):
        b.decode(scale=True)


@pytest.mark.parametrize("op", ["decode", "append"])
def test_nothing_is_allocated_when_everything_is_given(op: str, way: str) -> None:
    """No tensor, and no memory of Python's that grows with the call or stays after it."""
    b = filled()
    out, lse = torch.empty(2, 4, 16), torch.empty(2, 4)
    need = b.lib.workspace_bytes("decode", b.q, b.cache, b.table, b.lens, num_threads=1)
    given = {"out": out, "lse": lse, "workspace": torch.empty(need, dtype=torch.uint8), "num_threads": 1}
    rows = torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), torch.tensor([3])

    def call() -> None:
        if op == "decode":
            b.decode(**given)
        else:
            b.lib.append(b.cache, *rows)

    warm(call)
    tracemalloc.start()
    try:
        call()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        _, peak = tracemalloc.get_traced_memory()
        for _ in range(200):
            call()
        gc.collect()  # Python keeps the tuples of keys to use again, until then
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000, "something stays after each call"
    assert peak - before < 4096
    seen: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listen():
        torch.empty(1)
        call()
    assert seen == ["aten.empty.memory_format"], "the call made tensors of its own"


def test_the_kernel_of_decode_allocates_nothing() -> None:
    """What its shared object imports; the team of several threads is made once by OpenMP's runtime."""
    library_of = filled().lib.kernel("decode", "single").library
    data = library_of.path.read_bytes()
    assert b"\0omp_get_thread_num" in data, "names of imports are not where this test looks"
    assert not [name for name in (b"malloc", b"calloc", b"_Znwm", b"_Znam") if b"\0" + name + b"\0" in data]


def test_values_are_looked_at_again() -> None:
    b = filled()
    warm(b.decode)
    b.q, b.lens, b.table = b.q * 2, torch.tensor([8, 3], dtype=torch.int32), b.table.flip(0)
    found = b.decode()
    fresh = filled()
    fresh.q, fresh.lens, fresh.table = b.q, b.lens, b.table
    assert all(torch.equal(x, y) for x, y in zip(found, fresh.decode(), strict=True))


def spoil(name: str, at: Any, value: int) -> Callable[[Batch], None]:
    def change(b: Batch) -> None:
        tensor = getattr(b, name).clone()
        tensor[at] = value
        setattr(b, name, tensor)

    return change


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("decode", spoil("lens", 1, 9), r"kv_lens\[1\] = 9"),
        ("decode", spoil("lens", 0, -1), r"kv_lens\[0\] = -1"),
        ("decode", spoil("table", (1, 1), 6), r"page_table\[1, 1\] = 6"),
        ("decode", spoil("table", (0, 0), -1), r"page_table\[0, 0\] = -1"),
        ("prefill", spoil("starts", 0, 1), "q_starts"),
        ("prefill", spoil("starts", 1, 5), "q_starts"),
        ("prefill", spoil("starts", 2, 1), "q_starts"),
    ],
)
def test_bad_values_are_refused(op: str, change: Callable[[Batch], None], message: str) -> None:
    b = filled()
    warm(getattr(b, op))
    change(b)
    with pytest.raises(ArgumentError, match=message):
        getattr(b, op)()


@pytest.mark.parametrize("tokens", [3, 40])
def test_append_again(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Batch()
    b.cache, other = b.lib.new_cache(20), b.lib.new_cache(20)
    noise = torch.Generator().manual_seed(5)
    order = torch.randperm(80, generator=noise)
    rows = [torch.randn(tokens, 2, 16, generator=noise) for _ in range(4)]
    first, second = order[:tokens], order[tokens : 2 * tokens].clone()
    second[1] = -1
    b.lib.append(b.cache, *rows[:2], first)
    with monkeypatch.context() as shut:
        shut.setattr(b.lib, "kernel", None)  # the long way is closed
        b.lib.append(b.cache, *rows[2:], second)
    fresh = library("avx2", SPEC)
    fresh.append(other, *rows[:2], first)
    other.calls._known.clear()
    fresh.append(other, *rows[2:], second)
    assert all(torch.equal(plane, other.planes[name]) for name, plane in b.cache.planes.items())

    before = [plane.clone() for plane in b.cache.planes.values()]
    for value, message in (
        (80, r"slots\[2\] = 80"),
        (-2, r"slots\[2\] = -2"),
        (int(second[0]), "the same slot"),
    ):
        wrong = second.clone()
        wrong[2] = value
        with pytest.raises(ArgumentError, match=message):
            b.lib.append(b.cache, *rows[2:], wrong)
    twice_skipped = second.clone()
    twice_skipped[2] = -1
    b.lib.append(b.cache, *rows[2:], twice_skipped)
    assert all(torch.equal(a, c) for a, c in zip(before, b.cache.planes.values(), strict=True))


def test_unread_entries_may_hold_anything() -> None:
    b = filled()
    b.lens[0] = 3  # one page of two
    b.table[0, 1] = 2**31 - 1
    warm(b.decode)
    assert remembered(b) == 1


def test_pages_left_of_a_window_may_hold_anything() -> None:
    spec = make_spec("f32", "f32", page_size=4, kv_heads=2, group=2, head_dim=16, mask=(True, 2))
    b = Batch()
    b.lib = library("portable", spec)
    b.cache = b.lib.new_cache(6)
    b.table[1, 0] = 99
    warm(b.decode)
    b.table[1, 1] = 99
    with pytest.raises(ArgumentError, match=r"page_table\[1, 1\] = 99"):
        b.decode()


def test_outputs_given() -> None:
    b = filled()
    out, lse = torch.empty(2, 4, 16), torch.empty(2, 4)
    want = b.decode()
    for _ in range(3):
        found = b.decode(out=out.fill_(torch.nan), lse=lse.fill_(torch.nan))
        assert found[0] is out and found[1] is lse
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert remembered(b) == 2
    with pytest.raises(ArgumentError, match="out: shares memory with q"):
        b.decode(out=b.q, lse=lse)
    with pytest.raises(ArgumentError, match="lse: shares memory with out"):
        b.decode(out=out, lse=out.reshape(-1)[:8].reshape(2, 4))


@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_cut_short_or_off_their_boundary(name: str) -> None:
    b = filled()
    right = {"out": torch.empty(2, 4, 16), "lse": torch.empty(2, 4)}
    warm(lambda: b.decode(**right))
    place, size = right[name], right[name].nbytes
    odd = torch.frombuffer(bytearray(size + 4), dtype=torch.float32, offset=1, count=size // 4)
    with pytest.raises(ArgumentError, match=f"{name}: starts at an address that is no multiple of 4"):
        b.decode(**right | {name: odd.view(place.shape)})
    shifted = torch.empty(size // 4 + 7)[7:].view(place.shape)
    b.decode(**right | {name: shifted})
    shifted.untyped_storage().resize_(size + 24)
    with pytest.raises(ArgumentError, match=f"{name}: .* without memory"):
        b.decode(**right | {name: shifted})
    assert remembered(b) == 1


def freed_view(t: torch.Tensor) -> torch.Tensor:
    """A view into the middle of storage that was freed: its address is no null, it is its offset."""
    view = torch.cat([t.reshape(-1), t.reshape(-1)])[t.numel() :].view(t.shape)
    view.untyped_storage().resize_(0)
    return view


def cut_short(t: torch.Tensor) -> torch.Tensor:
    """A view whose storage ends one element before the view does."""
    view = torch.cat([t.reshape(-1), t.reshape(-1)])[t.numel() :].view(t.shape)
    view.untyped_storage().resize_((2 * t.numel() - 1) * t.itemsize)
    return view


def functional_view(t: torch.Tensor) -> torch.Tensor:
    return torch._to_functional_tensor(torch.cat([t.reshape(-1)] * 2)[t.numel() :].view(t.shape))


@pytest.mark.parametrize("form", [freed_view, cut_short, functional_view])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("decode", name) for name in ("q", "table", "lens")),
        *(("prefill", name) for name in ("q", "starts", "table", "lens")),
        *(("append", name) for name in ("k", "v", "slots")),
    ],
)
def test_memory_that_is_not_there(op: str, name: str, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    b = filled()
    warm(getattr(b, op))
    before = [plane.clone() for plane in b.cache.planes.values()]
    setattr(b, name, form(getattr(b, name)))
    with pytest.raises(ArgumentError, match=r"without memory|stands for another"):
        getattr(b, op)()
    assert all(torch.equal(a, c) for a, c in zip(before, b.cache.planes.values(), strict=True))


@pytest.mark.parametrize("form", [freed_view, functional_view])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_that_are_not_there(name: str, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    b = filled()
    right = {"out": torch.empty(2, 4, 16), "lse": torch.empty(2, 4)}
    warm(lambda: b.decode(**right))
    with pytest.raises(ArgumentError, match=r"without memory|stands for another"):
        b.decode(**right | {name: form(right[name])})


def test_workspace_given() -> None:
    b = filled()
    want = b.decode(num_threads=1)
    need = b.lib.workspace_bytes("decode", b.q, b.cache, b.table, b.lens, num_threads=1)
    found = warm(lambda: b.decode(num_threads=1, workspace=torch.empty(need, dtype=torch.uint8)))
    assert torch.equal(found[0], want[0])
    with pytest.raises(ArgumentError, match=f"workspace: .*{need}"):
        b.decode(num_threads=1, workspace=torch.empty(need - 1, dtype=torch.uint8))


@pytest.mark.parametrize("scale", [0.5, 0.25, None])
def test_scale_is_part_of_what_was_seen(scale: float | None) -> None:
    b = filled()
    b.decode()
    warm(lambda: b.decode(scale=2.0))
    fresh = filled()
    assert torch.equal(b.decode(scale=scale)[0], fresh.decode(scale=scale)[0])


def test_views_that_only_look_alike() -> None:
    b = filled()
    want = warm(b.decode)[0]
    b.q = torch._neg_view(b.q)
    with pytest.raises(ArgumentError, match="lazily negated"):
        b.decode()
    fresh = filled()
    wide = torch.zeros(2, 4, 32)
    wide[..., :16] = fresh.q
    fresh.q = wide[..., :16]  # other strides
    assert torch.equal(fresh.decode()[0], want)


def test_two_libraries_of_one_spec_share_a_cache() -> None:
    b = filled()
    warm(b.decode)
    other = library("avx2", SPEC)
    found = warm(lambda: other.decode(b.q, b.cache, b.table, b.lens))
    assert remembered(b) == 2
    torch.testing.assert_close(found[0], b.decode()[0], rtol=1e-5, atol=1e-5)


def test_forgets_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "LIMIT", 3)
    b = filled()
    for scale in (0.1, 0.2, 0.3, 0.4):
        b.decode(scale=scale)
    assert remembered(b) == 1


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("change", ["float64", "bfloat16", "meta"])
def test_torchs_defaults_may_change_between_calls(op: str, change: str) -> None:
    """Outputs that are made here have their own type: a default of bf16 halved the memory of lse."""
    b = filled()
    first = warm(getattr(b, op))
    default = torch.get_default_dtype()
    try:
        if change == "meta":
            with torch.device("meta"):
                again = getattr(b, op)()
        else:
            torch.set_default_dtype(getattr(torch, change))
            again = getattr(b, op)()
    finally:
        torch.set_default_dtype(default)
    assert again[1].dtype == torch.float32
    assert all(x.device.type == "cpu" and torch.equal(x, y) for x, y in zip(again, first, strict=True))


def test_a_mode_that_makes_tensors_without_memory_is_named() -> None:
    b = filled()
    first = warm(b.decode)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ArgumentError):
        b.decode()
    assert all(torch.equal(x, y) for x, y in zip(first, b.decode(), strict=True))
