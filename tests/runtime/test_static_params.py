"""Parameters of calls whose shapes were seen before: what the quick way may not take on trust."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvgen.builder import assemble
from kvgen.errors import ArgumentError
from tests.support.world import World
from tests.variants.calls import spec_with

LENS = [5, 9]


class Calls:
    """decode of one library, called with the same shapes again and again."""

    def __init__(self, **attention: Any) -> None:
        self.lib = assemble(spec_with(**attention), "cpu")
        self.world = World(self.lib, 16)
        self.table = self.world.table([40, 40])
        self.world.fill(self.table, [40, 40])
        self.q = self.world.query(2)

    def __call__(self, params: Any, lens: list[int] = LENS, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lens_B = torch.tensor(lens, dtype=torch.int32)
        found = self.lib.decode(self.q, self.world.cache, self.table, lens_B, params=params, **more)
        assert isinstance(found, tuple)
        return found


@pytest.fixture(scope="module")
def sinks() -> Calls:
    return Calls(sink_logit=True)


def test_positions_are_counted_in_every_call() -> None:
    dims = {"w": {"dims": ["kv"], "dtype": "f32"}}
    call = Calls(score="score - w[kv_pos]", params=dims)
    params = {"w": call.world.tensor(torch.zeros(12))}
    for _ in range(3):
        call(params)
    with pytest.raises(ArgumentError, match=r"params\['w'\]: shape \(12,\), but this call reads 40"):
        call(params, [5, 40])


@pytest.mark.parametrize(
    "spoil",
    [lambda t: t.numpy(), lambda t: t.to_sparse(), lambda t: t.to_mkldnn(), list],
    ids=["numpy", "sparse", "mkldnn", "list"],
)
def test_what_is_no_plain_tensor_is_refused(sinks: Calls, spoil: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(ArgumentError, match="sink_logit"):
        sinks({"sink_logit": spoil(torch.zeros(4))})


@pytest.mark.parametrize("params", [5, [("sink_logit", np.zeros(4))]])
def test_what_is_no_mapping_is_refused(sinks: Calls, params: Any) -> None:
    for finalize in (True, False):
        with pytest.raises(ArgumentError, match="give a mapping"):
            sinks(params, finalize=finalize)


def test_a_gradient_asked_for_later_is_refused(sinks: Calls) -> None:
    sink = torch.zeros(4)
    sinks({"sink_logit": sink})
    sink.requires_grad_(True)
    with pytest.raises(ArgumentError, match="gradient"):
        sinks({"sink_logit": sink})
    with torch.no_grad():
        sinks({"sink_logit": sink})


def test_outputs_on_a_parameter_are_refused(sinks: Calls) -> None:
    memory = torch.zeros(4 + 2 * 4 * 32)
    params = {"sink_logit": memory[:4]}
    apart, over = memory[4:].view(2, 4, 32), memory[:256].view(2, 4, 32)
    for _ in range(2):
        sinks(params, out=apart)
    with pytest.raises(ArgumentError, match="out"):
        sinks(params, out=over)
    with pytest.raises(ArgumentError, match="lse"):
        sinks(params, lse=memory[:8].view(2, 4))


def test_a_workspace_on_a_parameter_is_refused(sinks: Calls) -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    params = {"sink_logit": memory[:16].view(torch.float32)}
    for _ in range(2):
        sinks(params, workspace=memory[64:])
    with pytest.raises(ArgumentError, match="workspace"):
        sinks(params, workspace=memory)


def test_a_parameter_that_was_cut_short(sinks: Calls) -> None:
    sink = torch.zeros(4)
    for _ in range(3):
        sinks({"sink_logit": sink})
    sink.untyped_storage().resize_(12)
    with pytest.raises(ArgumentError, match="without memory"):
        sinks({"sink_logit": sink})
