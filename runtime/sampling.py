"""Sampling: the next token from a row of logits.

A draw depends on the request's seed and the token's position only, never on who else is in the batch, on
how the prompt was cut into chunks, or on a preemption.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvgen.runtime.arguments import INT64, need_integer, need_real
from kvgen.runtime.base import Tensor


@dataclass(frozen=True)
class Greedy:
    """The token with the highest logit; of equal ones, any."""


SEED_HINT = "give an integer from 0 to 2**64 - 1"


@dataclass(frozen=True)
class Sampled:
    """A draw from the softmax of ``logits / temperature``, cut to the likeliest tokens."""

    temperature: float = 1.0
    """Positive; small values favour likely tokens."""
    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keep the fewest likeliest tokens whose probabilities sum to this; in (0, 1]."""
    seed: int | None = None
    """0 to 2**64 - 1: two requests with the same seed draw the same numbers, in whatever company. None: an
    engine gives each request numbers of its own, which its ``seed`` and the request's id decide (0
    elsewhere)."""

    def __post_init__(self) -> None:
        hint = "give a positive number, or use Greedy()"
        need_real("temperature", self.temperature, 0, sys.float_info.max, hint)
        need_integer("top_k", self.top_k, 0, INT64, "give a number of tokens, or 0 for all")
        need_real("top_p", self.top_p, 0, 1, "give a number above 0, up to 1 (all)")
        if self.seed is not None:
            need_integer("seed", self.seed, 0, 2**64 - 1, SEED_HINT)

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
        bits = int(np.random.Philox(key=self.seed or 0, counter=position).random_raw())
        return (bits >> 11) * 2.0**-53


def _heaviest(weights: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` largest weights, largest first; of equal ones the lower ids."""
    found = np.flatnonzero(weights >= np.partition(weights, -count)[-count])
    return found[np.argsort(-weights[found], kind="stable")][:count]


def _reach(weights: np.ndarray, share: float) -> int:
    """How many of ``weights``, from the first on, sum to ``share``: at least one."""
    return int(np.searchsorted(np.cumsum(weights), share)) + 1


Sampling = Greedy | Sampled


def derived(seed: int, kind: str, number: int) -> int:
    """The seed of the ``number``-th "request" of an engine with ``seed``, or "fork" of a request with
    ``seed``: 64 bits that look unrelated."""
    words = f"{kind} {number} of {seed}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def seed_of(sampling: Sampling, seed: int) -> int:
    """The seed of ``sampling``, or ``seed`` where it has none."""
    given = sampling.seed if isinstance(sampling, Sampled) else None
    return seed if given is None else given


def seeded(sampling: Sampling, seed: int) -> Sampling:
    """The same with ``seed``, unless it has its own or draws nothing."""
    return replace(sampling, seed=seed_of(sampling, seed)) if isinstance(sampling, Sampled) else sampling


def choose(logits_SV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int | str]:
    """One token for each row of logits (S, vocab) f32: how to choose it, and the position it will have.

    A row whose highest logit is NaN or infinite says nothing: its reason stands in place of a token.
    """
    best, ids = logits_SV.max(dim=-1)
    found: list[int | str] = ids.tolist()
    for row, (value, how, position) in enumerate(zip(best.tolist(), samplings, positions, strict=True)):
        if not math.isfinite(value):
            found[row] = f"the highest of its logits is {value}: the model's forward must give finite ones"
        elif isinstance(how, Sampled):
            found[row] = how.draw(logits_SV[row].cpu().numpy(), position)
    return found
