"""Arguments that an adversary tried: each once crashed, hung, gave wrong numbers or an internal error."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgen.builder import assemble
from kvgen.errors import ArgumentError, SpecError, UnsupportedError
from kvgen.passes.validate import load_spec
from tests.runtime.test_arguments import SPEC, Batch
from tests.support.engines import library
from tests.support.specs import make_spec


def expanded(rows: int, *rest: int) -> torch.Tensor:
    return torch.zeros(1, *rest).expand(rows, *rest)


@pytest.mark.parametrize("scale", [True, "0.5", [1], 1j, 10**400, 1e-320, 1e39, torch.ones(2)], ids=str)
def test_scale_that_f32_cannot_hold(scale: Any) -> None:
    with pytest.raises(ArgumentError, match=r"scale = .*positive finite number of the f32 range"):
        Batch().decode(scale=scale)


@pytest.mark.parametrize("params", [5, [1], torch.zeros(2), {"a": 1, 2: 3}], ids=str)
def test_params_of_any_kind(params: Any) -> None:
    with pytest.raises(ArgumentError, match=r"give a mapping of names|reads no such parameter"):
        Batch().decode(params=params)


def test_table_without_dimensions() -> None:
    b = Batch()
    b.table = torch.tensor(0, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"page_table: shape \(\)"):
        b.decode()


@pytest.mark.parametrize("threads", [1025, 10**6, 2**31, 2**63])
def test_more_threads_than_can_start(threads: int) -> None:
    with pytest.raises(ArgumentError, match=r"num_threads = \d+: .*1 to 1024"):
        Batch().decode(num_threads=threads)


def test_prefill_without_starts() -> None:
    b = Batch()
    with pytest.raises(ArgumentError, match="q_starts = None: prefill needs"):
        b.lib.prefill(b.q, b.cache, b.table, b.lens, None)
    with pytest.raises(ArgumentError, match="q_starts = None: prefill needs"):
        b.lib.workspace_bytes("prefill", b.q, b.cache, b.table, b.lens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda b: {"out": expanded(2, 4, 16)}, "out: strides .* several elements into one place"),
        (lambda b: {"out": torch.zeros(2, 1, 16).expand(2, 4, 16)}, "out: strides"),
        (lambda b: {"lse": expanded(2, 4)}, "lse: strides"),
        (lambda b: {"out": b.q}, "out: shares memory with q"),
        (lambda b: {"lse": b.q[:, 0, :4]}, "lse: shares memory with q"),
    ],
    ids=["out rows", "out heads", "lse", "out is q", "lse in q"],
)
def test_outputs_that_overlap(given: Callable[[Batch], dict[str, Any]], message: str) -> None:
    b = Batch()
    with pytest.raises(ArgumentError, match=message):
        b.decode(**given(b))


def test_outputs_beside_each_other_are_fine() -> None:
    b = Batch()
    fused = torch.zeros(2, 8, 16)
    b.q = fused[:, :4]
    out, _ = b.decode(out=fused[:, 4:])
    assert out.data_ptr() == fused[:, 4:].data_ptr()


def test_merge_over_a_shifted_input() -> None:
    b = Batch()
    pool = torch.zeros(2, 4, 4, 16)
    b.outs = pool[:, :3]
    with pytest.raises(ArgumentError, match="out: shares memory with outs"):
        b.merge(out=pool[0, 1:])
    b.merge(out=pool[1, :3], lse=b.lses[0])


@pytest.mark.parametrize(
    "out", [(), (torch.zeros(1),), torch.zeros(13, 2, 16), [[1], [2]], 7, (torch.tensor(1.0),) * 2], ids=repr
)
def test_gather_into_no_pair(out: Any) -> None:
    with pytest.raises(ArgumentError, match=r"out.*(pair of tensors|torch tensor)"):
        Batch().gather(out=out)


def test_gather_of_both_into_one_place() -> None:
    rows = torch.zeros(13, 2, 16)
    with pytest.raises(ArgumentError, match=r"out\[1\]: shares memory with out\[0\]"):
        Batch().gather(out=(rows, rows))


def test_merge_of_lists() -> None:
    b = Batch()
    with pytest.raises(ArgumentError, match=r"outs = .*torch tensor"):
        b.lib.merge([b.outs], [b.lses])


def test_tensors_without_the_memory_they_show() -> None:
    b = Batch()
    b.q = torch._neg_view(b.q)
    with pytest.raises(ArgumentError, match=r"q: .*resolve_neg"):
        b.decode()
    b.q = torch.zeros(2, 4, 16)
    b.q.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"q: .*without memory"):
        b.decode()


def escaped(t: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    torch.func.vmap(lambda x: (kept.append(x), x)[1])(t[None])
    return kept[0]


def shrunk(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.nbytes // 2)
    return t


ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "csr": lambda t: t.reshape(t.shape[0], -1).to_sparse_csr(),
    "coo": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "storage": lambda t: t.untyped_storage(),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "functional": torch._to_functional_tensor,
    "vmap": escaped,
    "shrunk": shrunk,
    "misaligned": lambda t: torch.frombuffer(
        bytearray(t.nbytes + 8), dtype=t.dtype, offset=1, count=t.numel()
    ).view(t.shape),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ODD)
@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("prefill", name) for name in ("q", "table", "lens", "starts")),
        *(("append", name) for name in ("k", "v", "slots")),
        *(("copy", name) for name in ("src", "dst")),
        *(("merge", name) for name in ("outs", "lses")),
    ],
)
def test_tensors_of_every_odd_kind(op: str, name: str, form: str) -> None:
    b = Batch()
    setattr(b, name, ODD[form](getattr(b, name)))
    with pytest.raises(ArgumentError, match=r"^(page_table|kv_|q_|src_|dst_)?\w+( = |: )"):
        getattr(b, op)()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ODD)
@pytest.mark.parametrize("name", ["out", "lse", "workspace"])
def test_outputs_of_every_odd_kind(name: str, form: str) -> None:
    b = Batch()
    right = {"out": torch.zeros(2, 4, 16), "lse": torch.zeros(2, 4), "workspace": torch.zeros(2**16)}
    with pytest.raises(ArgumentError, match=f"^{name}( = |: )"):
        b.prefill(**{name: ODD[form](right[name])})


def test_row_starts_whose_differences_do_not_fit() -> None:
    """Differences of int32 wrap: these never seem to fall."""
    b = Batch()
    b.table, b.lens = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    wild = torch.tensor([0, 2**31 - 1, -2, 2], dtype=torch.int32)
    for op in (b.lib.prefill, b.lib.decode):
        for starts in (torch.tensor([0, 1, 1, 2], dtype=torch.int32), wild, wild):
            if starts is wild:
                with pytest.raises(ArgumentError, match=r"q_starts = .*never fall"):
                    op(b.q, b.cache, b.table, b.lens, starts)
            else:
                op(b.q, b.cache, b.table, b.lens, starts)


@pytest.mark.parametrize("name", ["out", "lse", "workspace"])
def test_nothing_is_written_over_the_cache_or_the_tables(name: str) -> None:
    """Also by a call whose shapes were seen: outputs over ``q_starts`` would send rows anywhere."""
    b = Batch()
    b.cache = b.lib.new_cache(60)
    big = torch.zeros(2**16, dtype=torch.uint8)
    right = {"out": torch.zeros(2, 4, 16), "lse": torch.zeros(2, 4), "workspace": big}
    slab, shape, dtype = b.cache.pools["kv"], right[name].shape, right[name].dtype
    b.prefill(**right)
    starts = big[: 3 * 4].view(torch.int32)
    b.starts = starts.copy_(torch.tensor([0, 1, 2]))
    over = {
        "the cache's k": slab.view(dtype)[: right[name].numel()].view(shape) if name != "workspace" else slab,
        "q_starts": big if name == "workspace" else big.view(dtype)[: right[name].numel()].view(shape),
    }
    for what, place in over.items():
        with pytest.raises(ArgumentError, match=f"{name}: shares memory with {what}"):
            b.prefill(**right | {name: place})


@pytest.mark.parametrize("again", [False, True])
def test_slots_and_pages_that_a_write_would_change(again: bool) -> None:
    b = Batch()
    slab = b.cache.pools["kv"]
    if again:
        b.append()
        b.copy()
    b.slots = slab[:24].view(torch.int64)
    with pytest.raises(ArgumentError, match="slots: shares memory with the cache's k"):
        b.append()
    b.src = slab[:8].view(torch.int32)
    with pytest.raises(ArgumentError, match="src_pages: shares memory with the cache's k"):
        b.copy()


def test_merge_into_the_other_input() -> None:
    b = Batch()
    lse = b.outs[1].view(-1)[:12].view(3, 4)
    with pytest.raises(ArgumentError, match="lse: shares memory with outs"):
        b.merge(out=b.outs[0], lse=lse)


def adopted(lib: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    given = {side: torch.zeros(6, 2, 4, 16) for side in "kv"}
    return lib.adopt(**given), given


def test_memory_of_a_cache_that_moves_or_goes() -> None:
    b = Batch()
    b.cache, given = adopted(b.lib)
    b.decode()
    for change in (lambda t: t.untyped_storage().resize_(0), lambda t: t.resize_(10**6)):
        with pytest.raises(RuntimeError, match="not resizable"):
            change(given["k"])
    given["v"].share_memory_()  # to another place
    given["v"].fill_(3)
    for _ in range(2):
        assert (b.decode()[0] == 3).all()
    given["v"].set_(torch.zeros(1))  # the caller's tensor only
    for _ in range(2):
        assert (b.decode()[0] == 3).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [*ODD, "meta", "freed"])
def test_adopted_planes_of_every_odd_kind(form: str) -> None:
    _, given = adopted(lib := library("portable", SPEC))
    if form == "freed":
        given["v"] = torch.zeros(6, 2, 4, 16)
        given["v"].untyped_storage().resize_(0)
    else:
        given["v"] = {**ODD, "meta": lambda t: t.to("meta")}[form](given["v"])
    with pytest.raises(ArgumentError, match=r"^v( = |: )"):
        lib.adopt(**given)


def test_planes_in_one_place() -> None:
    _, given = adopted(lib := library("portable", SPEC))
    with pytest.raises(ArgumentError, match="v: shares memory with k"):
        lib.adopt(k=given["k"], v=given["k"])


def test_a_cache_where_no_kernel_reaches_it() -> None:
    with pytest.raises(ArgumentError, match=r"cache: on meta, but the kernels run on cpu"):
        library("portable", SPEC).new_cache(2, device="meta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 10**5000}, "num_pages = <an integer of"),
        ({"num_pages": 2**31 - 1}, "num_pages = .* no room"),
        ({"num_pages": 3, "layers": 10**5000}, "layers = <an integer of .*more bytes than"),
        ({"num_pages": 3, "device": ""}, "device = ''"),
    ],
    ids=["digits", "bytes", "layers", "device"],
)
def test_caches_of_no_size(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        library("portable", SPEC).new_cache(**options)


def test_scales_of_any_size_are_counted_before_they_are_copied() -> None:
    lib = library("portable", make_spec("int8-head", "f32", page_size=8, kv_heads=2, group=2, head_dim=32))
    with pytest.raises(ArgumentError, match=r"scales\['k'\]: 1099511627776 values, but the spec has 2"):
        lib.new_cache(1, scales={"k": torch.ones(1).expand(2**40)})


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def freed() -> torch.Tensor:
    gone = torch.zeros(2)
    gone.untyped_storage().resize_(0)
    return gone


@pytest.mark.parametrize("value", [[freed()], freed(), Unprintable(), 10**5000, "x" * 9000], ids=range(5))
def test_values_that_must_not_be_shown(value: Any) -> None:
    b = Batch()
    for run in (
        lambda: b.decode(scale=value),
        lambda: b.decode(params=value),
        lambda: b.decode(num_threads=value),
        lambda: b.gather(dtype=value),
        lambda: b.lib.workspace_bytes(value, b.q, b.cache, b.table, b.lens),
        lambda: b.lib.append(b.cache, value, b.v, b.slots),
        lambda: b.lib.new_cache(1, scales={"k": value}),
        lambda: b.lib.new_cache(value),
    ):
        with pytest.raises(ArgumentError) as caught:
            run()
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 5}, "target = 5: give the name"),
        ({"target": "x" * 5000}, "target 'xxx.*is not known"),
        ({"target": "cpu-" + "x" * 5000}, "target = 'cpu-xxx.*not a CPU target"),
        ({"tune": ["off"]}, "tune = "),
        ({"schedule": 5}, "schedule = 5: give a mapping"),
        ({"schedule": {"decode": 5}}, r"schedule\['decode'\] = 5: give a mapping"),
        ({"schedule": {5: {}}}, r"schedule\[5\]: no such op"),
        ({"schedule": {"decode": {None: 1}}}, r"schedule\['decode'\]\[None\]: no such knob"),
        ({"schedule": {"decode": {"split_tokens": 10**5000}}}, r"schedule.*(constraint|give)"),
    ],
    ids=range(9),
)
def test_build_options_of_any_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=message) as caught:
        assemble(SPEC, **options)
    assert len(str(caught.value)) < 600


def test_more_rows_than_there_is_memory() -> None:
    b = Batch()
    with pytest.raises(ArgumentError, match="out: no memory for shape"):
        b.lib.merge(
            torch.zeros(1, 1, 4, 16).expand(1, 2**45, 4, 16), torch.zeros(1, 1, 4).expand(1, 2**45, 4)
        )


def test_messages_stay_short() -> None:
    b = Batch()
    with pytest.raises(ArgumentError) as caught:
        b.lib.append(b.cache, np.zeros((300, 2, 16)), b.v, b.slots)
    assert len(str(caught.value)) < 250
    layout = {"page_size": 16, "layout": "page kv " * 10_000, "k": {"format": "f32"}, "v": {"format": "f32"}}
    with pytest.raises(SpecError, match="too long") as refused:
        load_spec({"attention": {"q_heads": 1, "kv_heads": 1, "head_dim": 16}, "cache": layout})
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("device", ["bogus", "cuda:99"])
def test_cache_on_a_device_that_is_not_here(device: str) -> None:
    with pytest.raises(ArgumentError, match=r"device = .*torch cannot use it here"):
        library("portable", SPEC).new_cache(1, device=device)


@pytest.mark.parametrize("scales", [5, [1], {1: 2, "a": 3}], ids=str)
def test_scales_that_are_no_mapping(scales: Any) -> None:
    with pytest.raises(ArgumentError, match="scales"):
        library("portable", SPEC).new_cache(1, scales=scales)


def test_fork_after_threads() -> None:
    b = Batch()
    want, _ = b.decode(num_threads=2)
    child = os.fork()
    if child == 0:  # no return into pytest from here
        signal.alarm(20)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same = torch.equal(b.decode(num_threads=2)[0], want)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
