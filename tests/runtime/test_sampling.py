"""Sampling: frequencies, cuts, and draws that depend on seed and position alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.runtime.sampling import Greedy, Sampled, choose

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def draws(how: Sampled, logits: np.ndarray = LOGITS, count: int = 4000) -> np.ndarray:
    """How often each token comes at positions 0 to count - 1."""
    found = [how.draw(logits, position) for position in range(count)]
    return np.bincount(found, minlength=len(logits)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    want = np.exp(LOGITS / temperature)
    want /= want.sum()
    # Four standard deviations of a frequency of 4000 draws are below 0.032.
    np.testing.assert_allclose(draws(Sampled(temperature, seed=3)), want, atol=0.032)


@pytest.mark.parametrize(
    "how, kept",
    [
        (Sampled(top_k=1), {1}),
        (Sampled(top_k=3), {1, 3, 4}),
        (Sampled(top_k=99), {0, 1, 2, 3, 4}),
        (Sampled(top_p=0.39), {1}),
        (Sampled(top_p=0.41), {1, 3}),
        (Sampled(top_p=0.84), {1, 3, 4}),
        (Sampled(top_k=2, top_p=0.61), {1}),  # of the two, 1 has 0.4 / 0.65 = 0.615
        (Sampled(top_k=2, top_p=0.62), {1, 3}),
        (Sampled(top_p=1e-9), {1}),
    ],
)
def test_cuts_keep_the_likeliest(how: Sampled, kept: set[int]) -> None:
    found = draws(how)
    assert set(np.flatnonzero(found).tolist()) == kept
    p = np.exp(LOGITS)[sorted(kept)]
    np.testing.assert_allclose(found[sorted(kept)], p / p.sum(), atol=0.032)


def test_of_equal_logits_top_k_keeps_the_lower_ids() -> None:
    found = draws(Sampled(top_k=2), np.zeros(5, np.float32), 200)
    assert set(np.flatnonzero(found).tolist()) == {0, 1}


@pytest.mark.parametrize("top_p, kept", [(0.1, 200), (0.5, 1000), (0.9999, 2000)])
def test_a_nucleus_may_be_large(top_p: float, kept: int) -> None:
    # Falling so slowly that every token counts; ids shuffled by an odd factor.
    logits = np.zeros(2000, np.float32)
    logits[np.arange(2000) * 7 % 2000] = np.linspace(1e-3, 0, 2000)
    found = np.flatnonzero(draws(Sampled(top_p=top_p), logits, 3000))
    ranks = np.argsort(np.argsort(-logits, kind="stable"))[found]
    assert kept * 0.98 < ranks.max() < kept + 2


def test_impossible_tokens_are_never_drawn() -> None:
    found = draws(Sampled(temperature=100.0), np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32), 500)
    assert set(np.flatnonzero(found).tolist()) == {1, 3}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    one = [Sampled(seed=1).draw(LOGITS, at) for at in range(50)]
    assert one == [Sampled(seed=1).draw(LOGITS, at) for at in reversed(range(50))][::-1]
    assert one != [Sampled(seed=2).draw(LOGITS, at) for at in range(50)]
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=g)
    hows = [Sampled(seed=7), Greedy(), Sampled(0.7, 5, 0.9, 8), Greedy(), Sampled(seed=2**64 - 1), Sampled()]
    places = [3, 5, 900, 0, 2**31, 4]
    together = choose(logits, hows, places)
    for order in ([5, 4, 3, 2, 1, 0], [2], [0, 3]):
        some = choose(logits[order], [hows[i] for i in order], [places[i] for i in order])
        assert some == [together[i] for i in order]
    assert [together[1], together[3]] == logits[[1, 3]].argmax(-1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", [Greedy(), Sampled(seed=1)])
def test_logits_that_say_nothing_give_a_reason_and_spoil_no_other(value: float, how: Any) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    token, reason = choose(logits, [how, how], [0, 0])
    assert isinstance(token, int) and str(reason).startswith(f"the highest of its logits is {value}")
    (reason,) = choose(torch.full((1, 4), -torch.inf), [how], [0])
    assert "is -inf" in str(reason)


def test_without_a_seed_a_draw_outside_an_engine_has_seed_0() -> None:
    logits = torch.zeros(999).numpy()
    assert Sampled().draw(logits, 3) == Sampled(seed=0).draw(logits, 3) != Sampled(seed=1).draw(logits, 3)


@pytest.mark.filterwarnings("error")
def test_a_temperature_near_zero_draws_the_likeliest_and_says_nothing() -> None:
    logits = torch.tensor([[0.5, 2.0, -torch.inf, 1.0]])
    assert choose(logits, [Sampled(temperature=1e-320)], [0]) == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(options))} = .*: give"):
        Sampled(**options)
