"""Model: what an engine asks of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvgen.errors import ArgumentError
from kvgen.runtime.base import Tensor
from kvgen.runtime.layers import Layer
from kvgen.runtime.step import Step

Library = Any
"""A ``CacheOps``: what ``kvgen.build`` or ``kvgen.runtime.load`` returned."""


def need_model(model: Any) -> None:
    """Refuse what is no model, by the first thing that it lacks."""
    for name in ("num_layers", "vocab_size", "max_positions"):
        if type(getattr(model, name, None)) is not int:
            inner = ".model" if hasattr(getattr(model, "model", None), "forward") else ""
            hint = f"give its {inner}" if inner else "kvgen.models.session.load(...).model is one"
            raise ArgumentError(f"model: {type(model).__name__} has no {name} (an integer); {hint}")
    if not callable(getattr(model, "forward", None)):
        raise ArgumentError(f"model: {type(model).__name__} has no forward(step, layers)")


class Model(Protocol):
    """A decoder that leaves attention to ``kvgen.runtime.attend.attend``."""

    num_layers: int
    vocab_size: int
    max_positions: int
    """Tokens that a request may have, prompt included."""

    def forward(self, step: Step, layers: Sequence[Layer]) -> Tensor:
        """Logits (S, vocab_size) f32, a row for each of ``step.last_rows_S``; ``layers[i]`` is layer i's."""
        ...
