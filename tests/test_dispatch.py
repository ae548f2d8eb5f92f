"""Kernels by workload: the right one for each call, the same bits, and no more than one where all agree."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from kvgen.backends.cpu.backend import CpuBackend
from kvgen.builder import assemble
from kvgen.dispatch import Dispatch
from kvgen.errors import KvgenError
from kvgen.ir import Schedule
from kvgen.library import Library
from kvgen.resolve import resolve_target
from kvgen.tune import store
from kvgen.tune.choose import UntunedWarning
from kvgen.tune.defaults import default_schedule
from kvgen.tune.key import key_of
from kvgen.tune.space import load_space
from tests.support.faults import small

SPEC = small()
TARGET = resolve_target("cpu")
DEFAULT = default_schedule(CpuBackend(), "decode", SPEC, TARGET, {}).replace(heads=2)
OTHER = DEFAULT.replace(heads=1)
SPACE = load_space("cpp/decode")


def tuned(**buckets: Schedule) -> Library:
    """A library whose decode was tuned with these winners of buckets, ``b1x512=...``."""
    rows = {name.removeprefix("b"): store.Best(s, 1e-5, 1e-5) for name, s in buckets.items()}
    winners = store.Winners(DEFAULT, rows, "measured", "quick", "some CPU", "2026-01-02")
    store.write(winners, key_of("decode", SPEC, TARGET, {}, SPACE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        return assemble(SPEC, tune="cache", backend=CpuBackend("-O1"))


@pytest.fixture(autouse=True)
def _own(own_cache_dir: Any) -> None:
    """Winners of these tests only."""


def batch(library: Library, requests: int, context: int) -> tuple[Any, ...]:
    page, att = SPEC.cache.page_size, SPEC.attention
    width = -(-context // page)
    cache = library.new_cache(requests * width)
    noise = torch.Generator().manual_seed(3)
    tokens = requests * width * page
    k, v = (torch.randn(tokens, att.kv_heads, d, generator=noise) for d in (att.head_dim, att.v_head_dim))
    library.append(cache, k, v, torch.arange(tokens))
    table = torch.arange(requests * width, dtype=torch.int32).reshape(requests, width)
    lens = torch.full((requests,), context, dtype=torch.int32)
    return torch.randn(requests, att.q_heads, att.head_dim, generator=noise), cache, table, lens


def test_each_call_goes_to_the_kernel_of_its_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    library = tuned(b1x512=OTHER, b8x4096=DEFAULT)
    kernel: Any = library.kernel("decode", "single")
    assert isinstance(kernel, Dispatch) and kernel.plan.schedule == DEFAULT
    page = SPEC.cache.page_size

    def chosen(requests: int, context: int) -> Schedule:
        return kernel.at({"batch": requests, "table_width": context // page}).plan.schedule  # type: ignore[no-any-return]

    assert chosen(1, 64) == chosen(2, 256) == OTHER
    assert chosen(8, 4096) == chosen(32, 2048) == DEFAULT
    assert chosen(0, 512) == chosen(1, 0) == DEFAULT


def test_it_is_that_kernel_which_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    library = tuned(b1x32=OTHER, b8x32=DEFAULT)
    kernel: Any = library.kernel("decode", "single")
    ran: list[Schedule] = []
    for one in kernel._workloads.values():

        def launch(values: Any, one: Any = one, run: Any = one.launch) -> None:
            ran.append(one.plan.schedule)
            run(values)

        monkeypatch.setattr(one, "launch", launch)
    for requests in (1, 8, 2, 4):
        library.decode(*batch(library, requests, 20))
    assert ran == [OTHER, DEFAULT, OTHER, DEFAULT]


@pytest.mark.parametrize("requests", [1, 8])
def test_the_bits_are_the_same(requests: int) -> None:
    library = tuned(b1x512=OTHER, b8x4096=DEFAULT)
    # Pages of 37 have no tile of 16: a pin of it would be refused.
    pins = {knob: value for knob, value in DEFAULT.to_dict().items() if knob != "tile"}
    plain = assemble(SPEC, tune="off", schedule={"decode": pins}, backend=CpuBackend("-O1"))
    assert plain.schedules["decode"] == DEFAULT
    given = batch(library, requests, 700)
    want = plain.decode(*batch(plain, requests, 700))
    for _ in range(3):  # the third is a repeated call
        found = library.decode(*given)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    need = library.workspace_bytes("decode", *given)
    assert library.decode(*given, workspace=torch.empty(need, dtype=torch.uint8))[0] is not None


def test_one_kernel_where_all_agree() -> None:
    assert not tuned(b1x512=DEFAULT, b8x4096=DEFAULT).workloads
    assert not isinstance(tuned(b1x512=DEFAULT).kernel("decode"), Dispatch)


def test_pins_hold_for_workloads_too() -> None:
    tuned(b1x512=OTHER, b8x4096=DEFAULT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        pinned = assemble(SPEC, tune="cache", schedule={"decode": {"heads": 2}})
    assert not pinned.workloads and pinned.schedules["decode"] == DEFAULT


def test_all_of_them_are_compiled_at_once() -> None:
    library = tuned(b1x512=OTHER)
    library.prepare()
    assert isinstance(library._kernels["decode", "single"], Dispatch)
    assert library._plan("decode", "multi").schedule == DEFAULT, "an export holds the general kernel"
    with pytest.raises(KvgenError, match="no variant"):
        library.kernel("decode", "triple")
