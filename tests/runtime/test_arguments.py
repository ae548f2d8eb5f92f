"""What the ops refuse: every message names the argument, what it is and what would work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from tests.support.engines import library
from tests.support.specs import make_spec

SPEC = make_spec("f32", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)


class Batch:
    """Arguments of every op that are right; a test spoils one of them."""

    def __init__(self) -> None:
        self.lib = library("portable", SPEC)
        self.cache = self.lib.new_cache(6)
        self.q = torch.zeros(2, 4, 16)
        self.table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        self.lens = torch.tensor([5, 8], dtype=torch.int32)
        self.starts = torch.tensor([0, 1, 2], dtype=torch.int32)
        self.k, self.v = torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)
        self.slots = torch.tensor([0, 1, -1])
        self.src, self.dst = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
        self.outs, self.lses = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 4)

    def decode(self, **options: Any) -> Any:
        return self.lib.decode(self.q, self.cache, self.table, self.lens, **options)

    def prefill(self, **options: Any) -> Any:
        return self.lib.prefill(self.q, self.cache, self.table, self.lens, self.starts, **options)

    def gather(self, **options: Any) -> Any:
        return self.lib.gather(self.cache, self.table, self.lens, **options)

    def append(self) -> Any:
        return self.lib.append(self.cache, self.k, self.v, self.slots)

    def copy(self) -> Any:
        return self.lib.copy(self.cache, self.src, self.dst)

    def merge(self, **options: Any) -> Any:
        return self.lib.merge(self.outs, self.lses, **options)


def replaced(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Batch], None]:
    return lambda b: setattr(b, name, change(getattr(b, name)))


def put(name: str, at: Any, value: int) -> Callable[[Batch], None]:
    def change(b: Batch) -> None:
        getattr(b, name)[at] = value

    return change


TABLES = [
    # ops, what is wrong, what the message must say
    ("decode prefill gather", replaced("table", torch.Tensor.long), r"page_table: dtype int64.*\.int\(\)"),
    ("decode prefill gather", replaced("lens", torch.Tensor.long), r"kv_lens: dtype int64.*\.int\(\)"),
    ("prefill", replaced("starts", torch.Tensor.long), r"q_starts: dtype int64.*\.int\(\)"),
    ("append", replaced("slots", torch.Tensor.int), r"slots: dtype int32.*\.long\(\)"),
    ("copy", replaced("src", torch.Tensor.long), r"src_pages: dtype int64.*\.int\(\)"),
    ("decode", replaced("q", torch.Tensor.bfloat16), r"q: dtype bfloat16, not float32"),
    ("append", replaced("k", torch.Tensor.double), r"k: dtype float64, not bfloat16 or float16 or float32"),
    ("append", replaced("v", torch.Tensor.half), r"v: dtype float16, not float32"),
    ("merge", replaced("lses", torch.Tensor.double), r"lses: dtype float64, not float32"),
    ("decode", replaced("q", lambda t: t[:1]), r"q: shape \(1, 4, 16\), not \(2, 4, 16\)"),
    ("decode prefill", replaced("q", lambda t: t[:, :3]), r"q: shape \(2, 3, 16\)"),
    ("decode prefill gather", replaced("table", lambda t: t[0]), r"page_table: shape \(2,\), not \(B, P\)"),
    ("decode prefill gather", replaced("table", lambda t: t[0, :1]), r"use page_table\[None\]"),
    ("decode prefill", replaced("table", lambda t: t[:1]), r"page_table: shape \(1, 2\), not \(2, P\)"),
    ("decode", replaced("table", lambda t: t.repeat(2, 1)), r"page_table: shape \(4, 2\), not \(2, P\)"),
    ("decode gather", replaced("lens", lambda t: t[:1]), r"kv_lens: shape \(1,\), not \(2\)"),
    ("prefill", replaced("starts", lambda t: t[:2]), r"q_starts: shape \(2,\), not \(3\)"),
    ("append", replaced("v", lambda t: t[:2]), r"v: shape \(2, 2, 16\), not \(3, 2, 16\)"),
    ("append", replaced("slots", lambda t: t[:2]), r"slots: shape \(2,\), not \(3\)"),
    ("merge", replaced("lses", lambda t: t[:1]), r"lses: shape \(1, 3, 4\), not \(2, 3, 4\)"),
    ("copy", replaced("dst", lambda t: t[:1]), r"dst_pages: shape \(1,\), not \(2\)"),
    ("decode prefill", replaced("q", lambda t: t.mT.contiguous().mT), r"q: last dim.*\.contiguous\(\)"),
    ("decode gather", replaced("table", lambda t: t.T.contiguous().T), r"page_table: last .*contiguous"),
    ("append", replaced("k", lambda t: t.mT.contiguous().mT), r"k: last dimension has stride .*contiguous"),
    ("decode prefill", replaced("q", lambda t: t.to("meta")), r"q: on meta, but the cache is on cpu"),
    ("decode gather", replaced("table", lambda t: t.to("meta")), r"page_table: on meta"),
    ("decode prefill gather", put("lens", 1, 9), r"kv_lens\[1\] = 9: a row of 2 pages .*holds 0 to 8"),
    ("decode prefill gather", put("lens", 0, -1), r"kv_lens\[0\] = -1"),
    ("decode prefill gather", put("table", (0, 1), 6), r"page_table\[0, 1\] = 6: the pool has pages 0 to 5"),
    ("decode prefill gather", put("table", (1, 0), -1), r"page_table\[1, 0\] = -1"),
    ("prefill", put("starts", 0, 1), r"q_starts = .*must start at 0"),
    ("prefill", put("starts", 1, 3), r"q_starts = .*never fall"),
    ("prefill", put("starts", 2, 1), r"q_starts = .*end at the 2 rows of q"),
    ("append", put("slots", 1, 24), r"slots\[1\] = 24: give -1 \(skip\) or 0 to 23"),
    ("append", put("slots", 1, -2), r"slots\[1\] = -2"),
    ("append", put("slots", 1, 0), r"slots\[0\] and slots\[1\] = 0: the same slot twice"),
    ("copy", put("src", 0, 6), r"src_pages\[0\] = 6: the pool has pages 0 to 5"),
    ("copy", put("dst", 0, -1), r"dst_pages\[0\] = -1"),
    ("copy", put("dst", 0, 3), r"dst_pages: page 3 is a destination twice"),
    ("copy", put("dst", 0, 1), r"page 1 is both a source and a destination"),
    ("decode prefill gather append copy", replaced("cache", lambda c: c.k), r"cache: a Tensor; give what"),
    ("decode", replaced("q", lambda t: t.tolist()), r"q = \[\[\[.*give a torch tensor"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "spoil", "message"),
    [(op, spoil, message) for ops, spoil, message in TABLES for op in ops.split()],
)
def test_refused(op: str, spoil: Callable[[Batch], None], message: str) -> None:
    batch = Batch()
    spoil(batch)
    with pytest.raises(ArgumentError, match=message):
        getattr(batch, op)()


@pytest.mark.parametrize("op", ["decode", "prefill", "merge", "gather", "append", "copy"])
def test_right_arguments_are_taken(op: str) -> None:
    getattr(Batch(), op)()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, r"scale = 0.0: give a positive finite number"),
        ({"scale": float("nan")}, r"scale = nan"),
        (
            {"params": {"slope": torch.ones(4)}},
            r"params\['slope'\]: this op reads no such parameter; leave params out",
        ),
        ({"out": torch.zeros(2, 4, 8)}, r"out: shape \(2, 4, 8\), not \(2, 4, 16\)"),
        ({"out": torch.zeros(2, 4, 16).half()}, r"out: dtype float16, not float32"),
        ({"lse": torch.zeros(2, 4).double()}, r"lse: dtype float64, not float32"),
        ({"workspace": torch.zeros(8)}, r"workspace: 32 bytes, but this call needs \d+; see workspace_bytes"),
        ({"workspace": torch.zeros(99999, dtype=torch.uint8)[1:]}, r"workspace: .* no multiple of 16 bytes"),
        ({"workspace": torch.zeros(9999, 2)[:, 0]}, r"workspace: not contiguous"),
        ({"workspace": torch.zeros(9999, device="meta")}, r"workspace: on meta"),
        ({"workspace": 9999}, r"workspace = 9999: give a torch tensor"),
        ({"num_threads": 0}, r"threads = 0"),
    ],
)
def test_options_refused(options: dict[str, Any], message: str) -> None:
    for op in ("decode", "prefill"):
        with pytest.raises(ArgumentError, match=message):
            getattr(Batch(), op)(**options)


@pytest.mark.parametrize("op", ["decode", "prefill", "merge", "gather"])
def test_unknown_keywords_are_type_errors(op: str) -> None:
    """A window given to a spec without one must not be ignored."""
    with pytest.raises(TypeError, match="window"):
        getattr(Batch(), op)(window=5)


def test_a_batch_of_none_has_no_query_rows() -> None:
    """Rows of q that belong to no request would come back as whatever memory held."""
    b = Batch()
    none = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    for starts in ([0], [2]):
        q_starts = torch.tensor(starts, dtype=torch.int32)
        for op in (b.lib.prefill, b.lib.decode):
            with pytest.raises(ArgumentError, match=r"q_starts = \[\d\]: must start at 0"):
                op(b.q, b.cache, *none, q_starts)


def test_nothing_to_do_is_legal() -> None:
    """No token, no request, no pair, no state: empty results, no launch."""
    b = Batch()
    empty = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    q, zero = torch.zeros(0, 4, 16), torch.zeros(1, dtype=torch.int32)
    for out, lse in (
        b.lib.decode(q, b.cache, *empty),
        b.lib.decode(q, b.cache, *empty, zero),
        b.lib.prefill(q, b.cache, *empty, zero),
        b.lib.merge(torch.zeros(2, 0, 4, 16), torch.zeros(2, 0, 4)),
    ):
        assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
    assert [tuple(t.shape) for t in b.lib.gather(b.cache, *empty)] == [(0, 2, 16)] * 2
    b.lib.append(b.cache, torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), torch.zeros(0, dtype=torch.int64))
    b.lib.copy(b.cache, torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    # requests without queries, and requests without keys
    q_starts = torch.zeros(3, dtype=torch.int32)
    assert b.lib.prefill(q, b.cache, b.table, b.lens, q_starts)[0].shape == (0, 4, 16)
    out, lse = b.lib.decode(b.q, b.cache, b.table[:, :0], torch.zeros(2, dtype=torch.int32))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_table_tails_may_hold_anything() -> None:
    b = Batch()
    want = b.decode()
    b.table = torch.cat([b.table, torch.tensor([[2**31 - 1, -7], [-1, 99]], dtype=torch.int32)], 1)
    assert torch.equal(b.decode()[0], want[0])
    assert b.gather()[0].shape == (13, 2, 16)


def test_unchecked_skips_the_values_only() -> None:
    b = Batch()
    b.lib.checked = False
    try:
        b.slots[1] = 0  # twice: undefined, not refused
        b.append()
        b.table = b.table.long()
        with pytest.raises(ArgumentError, match="page_table: dtype int64"):
            b.decode()
    finally:
        b.lib.checked = True


def test_line_19_a_cache_of_another_layout_is_refused() -> None:
    """HND handed to NHD: with as many heads as tokens in a page every shape agrees."""
    hnd, nhd = (
        library("portable", make_spec("f32", "f32", layout=name, page_size=4, kv_heads=4, head_dim=16))
        for name in ("hnd", "nhd")
    )
    cache = hnd.new_cache(2)
    assert cache.k.shape == nhd.new_cache(2).k.shape
    q, table, lens = torch.zeros(1, 4, 16), torch.zeros(1, 1).int(), torch.ones(1).int()
    message = r"made for spec .*page kv head tok d.* this library reads .*page kv tok head d"
    with pytest.raises(ArgumentError, match=message):
        nhd.decode(q, cache, table, lens)
    with pytest.raises(ArgumentError, match=message):
        nhd.copy(cache, lens, lens)


def test_two_threads_do_not_share_a_workspace() -> None:
    """Kernels run without the interpreter lock, so one scratch for all calls would be overwritten."""
    import threading

    from tests.support.world import World

    lib = library("portable", make_spec("f32", "f32", kv_heads=2, group=4))
    world = World(lib, 140, seed=1)
    lens = [2000]
    table, lens_B = world.table(lens), world.ints(lens)
    world.fill(table, lens)
    queries = [world.query(1) for _ in range(2)]
    want = [lib.decode(q, world.cache, table, lens_B, num_threads=1) for q in queries]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(40):
            got = lib.decode(queries[i], world.cache, table, lens_B, num_threads=1)
            if not (torch.equal(got[0], want[i][0]) and torch.equal(got[1], want[i][1])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_gradient_is_not_cut_off_in_silence() -> None:
    """Also where a call of the same shapes was seen before."""
    batch = Batch()
    batch.decode()
    batch.q.requires_grad_()
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"q: requires a gradient, .*q.detach\(\)"):
            batch.decode()
    with torch.no_grad():
        batch.decode()
    with pytest.raises(ArgumentError, match="q: requires a gradient"):
        batch.decode()
