"""A tiny decoder with random weights, and what it says in float64 with nothing cached, paged or batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvgen.ir import Spec
from kvgen.runtime.attend import attend
from kvgen.runtime.layers import Layer
from kvgen.runtime.step import Step
from tests.support.specs import make_spec

SPEC = make_spec("f32", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)
"""The attention of ``TinyModel``."""


class TinyModel:
    """Two layers of grouped-query attention over 61 tokens; position is a learned vector, as in GPT-2."""

    num_layers = 2
    vocab_size = 61

    def __init__(self, *specs: Spec, max_positions: int = 64, seed: int = 0) -> None:
        """``specs``: of each layer, whose heads must be the same; one stands for both."""
        self.specs, self.max_positions = (specs or (SPEC,)) * (2 if len(specs) < 2 else 1), max_positions
        self.spec = spec = self.specs[0]
        att, width, g = spec.attention, 48, torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=g) / math.sqrt(columns)

        self.embed, self.place = weights(self.vocab_size, width), weights(max_positions, width)
        kv = att.kv_heads * att.head_dim
        # Large queries make attention choose: with a mean over all keys every prompt would go on alike.
        self.layers = [
            [
                4 * weights(att.q_heads * att.head_dim, width),
                weights(kv, width),
                weights(kv, width),
                weights(width, att.q_heads * att.head_dim),
            ]
            for _ in range(self.num_layers)
        ]
        self.head = weights(self.vocab_size, width)
        self.steps: list[Step] = []
        """The steps that ``forward`` was given."""

    def forward(self, step: Step, layers: Sequence[Layer]) -> torch.Tensor:
        self.steps.append(step)
        att, rows = self.spec.attention, len(step.tokens_T)
        x = self.embed[step.tokens_T] + self.place[step.positions_T]
        for (q, k, v, o), layer in zip(self.layers, layers, strict=True):
            y = _norm(x)
            heads = [(y @ w.T).view(rows, n, att.head_dim) for w, n in _heads(att, q, k, v)]
            x = x + attend(layer, *heads, step).reshape(rows, -1) @ o.T
        return _norm(x[step.last_rows_S]) @ self.head.T

    def exact_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of the next token in float64: the whole sequence anew, one head at a time."""
        att, at = self.spec.attention, torch.tensor(tokens)
        x = self.embed.double()[at] + self.place.double()[: len(at)]
        for spec, weights in zip(self.specs, self.layers, strict=True):
            q, k, v, o = (w.double() for w in weights)
            y = _norm(x)
            rows = [(y @ w.T).view(len(at), n, att.head_dim) for w, n in _heads(att, q, k, v)]
            x = x + exact_attention(spec, *rows).reshape(len(at), -1) @ o.T
        return _norm(x[-1]) @ self.head.double().T

    def exact_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` greedy tokens; fails where the two best are so close that f32 may well swap them."""
        tokens = list(prompt)
        for _ in range(count):
            best, ids = self.exact_logits(tokens).topk(2)
            assert best[0] - best[1] > 1e-4, "too close a call for a test: take another prompt"
            tokens.append(int(ids[0]))
        return tokens[len(prompt) :]


def exact_attention(spec: Spec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Float64 attention of one request's last rows q (Q, heads, d) over all its k and v, a head at a time."""
    att = spec.attention
    # How far each key stands behind the row that looks at it.
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (behind < 0) | (behind > (len(k) if att.window is None else att.window))
    outs = []
    for h in range(att.q_heads):
        own = h // att.group
        scores = q[:, h].double() @ k[:, own].double().T * att.scale
        outs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, own].double())
    return torch.stack(outs, 1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def _heads(att: Any, q: Any, k: Any, v: Any) -> list[tuple[torch.Tensor, int]]:
    return [(q, att.q_heads), (k, att.kv_heads), (v, att.kv_heads)]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(TinyModel.vocab_size, (n,), generator=g).tolist() for n in lengths]
