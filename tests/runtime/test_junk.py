"""Anything at all for any argument of any op: it works, or one line says what is wrong."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.errors import ArgumentError, KvgenError
from tests.runtime.test_arguments import Batch
from tests.runtime.test_renamed import calls

JUNK = (
    *(np.zeros(2), np.array([1.5, 2.0], object), np.int64(3), torch.zeros(2), torch.zeros(())),
    *(object(), Exception, "x", b"x", 1.5, float("nan"), 10**30, -1, True, None, [1, 2], {"a": 1}),
)


@pytest.mark.parametrize("op", [*calls(Batch()), "copy", "new_cache", "adopt"])
def test_one_line_for_anything(op: str) -> None:
    b = Batch()
    more = {
        "copy": (b.lib.copy, {"cache": b.cache, "src_pages": b.src, "dst_pages": b.dst}),
        "new_cache": (b.lib.new_cache, {"num_pages": 4}),
        "adopt": (b.lib.adopt, {"k": torch.zeros(2, 2, 4, 16), "v": torch.zeros(2, 2, 4, 16)}),
    }
    call, given = (calls(b) | more)[op]
    said: list[str] = []
    for name in [*given, *(set(inspect.signature(call).parameters) - {*given, "planes"})]:
        for value in JUNK:
            try:
                call(**{**given, name: value})
            except KvgenError as error:
                said.append(str(error))
    assert len(said) > len(given) * len(JUNK) // 2
    assert all("\n" not in line and len(line) < 400 for line in said)


@pytest.mark.parametrize("params", [np.zeros(2), np.zeros(0), torch.zeros(2)], ids=["two", "none", "torch"])
def test_params_that_have_no_truth(params: Any) -> None:
    for op in ("decode", "prefill", "merge"):
        with pytest.raises(ArgumentError, match=r"params = .*give a mapping of names to tensors"):
            getattr(Batch(), op)(params=params)


@pytest.mark.parametrize("finalize", [torch.zeros(2), np.zeros(2), 1, None], ids=str)
def test_finalize_that_has_no_truth(finalize: Any) -> None:
    for op in ("decode", "merge"):
        with pytest.raises(ArgumentError, match=r"finalize = .*give True or False"):
            getattr(Batch(), op)(finalize=finalize)


def test_a_prefix_of_a_numpy_length() -> None:
    b = Batch()
    call, given = calls(b)["cascade"]
    want, _ = call(**given)
    found, _ = call(**given | {"prefix_len": np.int64(given["prefix_len"])})
    assert torch.equal(found, want)
    with pytest.raises(ArgumentError, match="prefix_len = None: give 0 to 8"):
        call(**given | {"prefix_len": None})


@pytest.mark.parametrize("move", [pickle.dumps, copy.copy, copy.deepcopy])
def test_libraries_and_caches_stay_in_their_process(move: Any) -> None:
    b = Batch()
    with pytest.raises(ArgumentError, match=r"kernels are loaded into this process.*build\(\).*load\(\)"):
        move(b.lib)
    with pytest.raises(ArgumentError, match=r"memory that a library's kernels know.*new_cache\(\)"):
        move(b.cache)
