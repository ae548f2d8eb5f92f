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

from kvgen.errors import ArgumentError, SpecError
from kvgen.passes.validate import load_spec
from tests.runtime.test_arguments import SPEC, Batch
from tests.support.engines import library


def expanded(rows: int, *rest: int) -> torch.Tensor:
    return torch.zeros(1, *rest).expand(rows, *rest)


@pytest.mark.parametrize("scale", [True, "0.5", [1], 1j, 10**400, 1e-320, 1e39, torch.ones(2)], ids=str)
def test_scale_that_f32_cannot_hold(scale: Any) -> None:
    with pytest.raises(ArgumentError, match=r"scale = .*positive finite number of the f32 range"):
        Batch().decode(scale=scale)


@pytest.mark.parametrize("params", [5, [1], torch.zeros(2), {"a": 1, 2: 3}], ids=str)
def test_params_of_any_kind(params: Any) -> None:
    with pytest.raises(ArgumentError, match="declares no parameters"):
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
