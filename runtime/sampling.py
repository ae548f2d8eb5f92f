"""Sampling: the next token from a row of logits.

A draw depends on the request's seed and the token's position only, never on who else is in the batch, on
how the prompt was cut into chunks, or on a preemption.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgen.errors import ArgumentError
from kvgen.runtime.arguments import INT64, need_integer, need_real
from kvgen.runtime.base import Tensor


@dataclass(frozen=True)
class Greedy:
    """The token with the highest logit; of equal ones, any."""


@dataclass(frozen=True)
class Sampled:
    """A draw from the softmax of ``logits / temperature``, cut to the likeliest tokens."""

    temperature: float = 1.0
    """Positive; small values favour likely tokens."""
    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keep the fewest likeliest tokens whose probabilities sum to this; in (0, 1]."""
    seed: int = 0
    """0 to 2**64 - 1."""

    def __post_init__(self) -> None:
        hint = "give a positive number, or use Greedy()"
        need_real("temperature", self.temperature, 0, sys.float_info.max, hint)
        need_integer("top_k", self.top_k, 0, INT64, "give a number of tokens, or 0 for all")
        need_real("top_p", self.top_p, 0, 1, "give a number above 0, up to 1 (all)")
        need_integer("seed", self.seed, 0, 2**64 - 1, "give an integer from 0 to 2**64 - 1")

    def draw(self, logits_V: np.ndarray, position: int) -> int:
        """The token at ``position``, from logits whose highest is finite."""
        scores = logits_V.astype(np.float64)
        with np.errstate(
            over="ignore"
        ):  # a temperature near 0: all but the likeliest are at -inf, as they are
            weights = np.exp((scores - scores.max()) / self.temperature)
        ids = self._keep(weights)
        sums = np.cumsum(weights[ids])
        at = int(np.searchsorted(sums, self._uniform(position) * sums[-1], side="right"))
        return int(ids[min(at, len(ids) - 1)])

    def _keep(self, weights: np.ndarray) -> np.ndarray:
        """Ids of the tokens that the cuts leave, likeliest first where anything is cut."""
        count = min(self.top_k or len(weights), len(weights))
        if self.top_p == 1:
            return np.arange(count) if count == len(weights) else _heaviest(weights, count)
        if self.top_k:
            ids = _heaviest(weights, count)
            return ids[: _reach(weights[ids], self.top_p * weights[ids].sum())]
        # A few tokens have most of the weight as a rule, and sorting all takes milliseconds.
        ids = _heaviest(weights, min(512, count))
        if weights[ids].sum() < self.top_p * weights.sum():
            ids = _heaviest(weights, count)
        return ids[: _reach(weights[ids], self.top_p * weights.sum())]

    def _uniform(self, position: int) -> float:
        """A number in [0, 1) that seed and position alone decide (a counter-based generator)."""
        bits = int(np.random.Philox(key=self.seed, counter=position).random_raw())
        return (bits >> 11) * 2.0**-53


def _heaviest(weights: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` largest weights, largest first; of equal ones the lower ids."""
    found = np.flatnonzero(weights >= np.partition(weights, -count)[-count])
    return found[np.argsort(-weights[found], kind="stable")][:count]


def _reach(weights: np.ndarray, share: float) -> int:
    """How many of ``weights``, from the first on, sum to ``share``: at least one."""
    return int(np.searchsorted(np.cumsum(weights), share)) + 1


Sampling = Greedy | Sampled


def choose(logits_SV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token for each row of logits (S, vocab) f32: how to choose it, and the position it will have.

    Raises ``ArgumentError`` for a row whose highest logit is NaN or infinite: such a row says nothing.
    """
    best, ids = logits_SV.max(dim=-1)
    for row, value in enumerate(best.tolist()):
        if not math.isfinite(value):
            raise ArgumentError(
                f"logits[{row}]: the highest is {value}; the model's forward must give finite logits"
            )
    tokens: list[int] = ids.tolist()
    for row, (how, position) in enumerate(zip(samplings, positions, strict=True)):
        if isinstance(how, Sampled):
            tokens[row] = how.draw(logits_SV[row].cpu().numpy(), position)
    return tokens
