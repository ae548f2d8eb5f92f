"""What storing K and V in fewer bits costs a model: its next-token distributions against f32 pages.

The same text goes through the same model twice, window by window, each token given (teacher forcing).
Paired distributions have little noise: a mean KL is meaningful after some hundred tokens, where
perplexities would need many thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError
from kvgen.models.kernels import built
from kvgen.runtime.base import Tensor
from kvgen.runtime.layers import new_layers
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import Rows, build_step

if TYPE_CHECKING:
    from kvgen.models.adaptor import TransformersModel
    from kvgen.models.pages import ModelSpecs

Advance = Callable[[str, int, int], None]
"""Called with the name of the pages, the tokens done and their number."""

ROWS = 128
"""Rows of logits that are compared at once: bounds the memory for large vocabularies."""


@dataclass(frozen=True)
class Row:
    """One kind of pages against f32 pages."""

    pages: str
    """The spec's name."""
    kl_nats: float
    """Mean over tokens of KL(f32 pages || these pages), in nats."""
    kl_largest: float
    """The largest of any token."""
    top1_agreement: float
    """Fraction of tokens whose likeliest next token is the same."""
    perplexity: float
    """exp of the mean loss on the text's own next tokens."""
    bytes_per_token: int
    """Bytes of K and V of one token in all layers, scales included."""


@dataclass(frozen=True)
class Report:
    """A text through f32 pages and others."""

    model: str
    tokens: int
    window: int
    perplexity: float
    """Of f32 pages."""
    bytes_per_token: int
    """Of f32 pages."""
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass
class _Sums:
    """Running sums over tokens, in double precision."""

    kl: float = 0.0
    largest: float = 0.0
    same: int = 0
    loss: float = 0.0


def default_text() -> str:
    """English text that every Python brings: the help topics of pydoc."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def measure(
    model: TransformersModel,
    tokens: Sequence[int],
    reference: ModelSpecs,
    specs: Sequence[ModelSpecs],
    *,
    name: str = "model",
    window: int | None = None,
    advance: Advance = lambda pages, done, total: None,
) -> Report:
    """Run ``tokens`` through ``reference`` (f32 pages) and each of ``specs``, in windows of so many tokens.

    The default is 512, or all positions of a model with fewer. Every window begins anew at position 0.
    Raises ``ArgumentError`` for a text or window that is too short or longer than the model's positions.
    """
    import torch

    window = min(512, model.max_positions) if window is None else window
    if not 2 <= window <= model.max_positions:
        raise ArgumentError(f"window = {window}: give 2 to {model.max_positions} tokens")
    if len(tokens) < 2:
        raise ArgumentError(f"text of {len(tokens)} tokens: give at least 2")
    runners = [_Runner(model, spec, window) for spec in (reference, *specs)]
    ours = [_Sums() for _ in runners]
    rows = targets = 0
    for start, part in _windows(tokens, window):
        advance(reference[0].name, start, len(tokens))
        want_SV = runners[0].logits(part)
        next_S = torch.tensor(part[1:])
        ours[0].loss += _loss(want_SV[:-1], next_S)
        for runner, sums in zip(runners[1:], ours[1:], strict=True):
            advance(runner.name, start, len(tokens))
            got_SV = runner.logits(part)
            sums.loss += _loss(got_SV[:-1], next_S)
            _compare(want_SV, got_SV, sums)
        rows += len(part)
        targets += len(part) - 1
    return Report(
        model=name,
        tokens=rows,
        window=window,
        perplexity=math.exp(ours[0].loss / targets),
        bytes_per_token=runners[0].bytes_per_token,
        rows=tuple(
            Row(
                pages=runner.name,
                kl_nats=sums.kl / rows,
                kl_largest=sums.largest,
                top1_agreement=sums.same / rows,
                perplexity=math.exp(sums.loss / targets),
                bytes_per_token=runner.bytes_per_token,
            )
            for runner, sums in zip(runners[1:], ours[1:], strict=True)
        ),
    )


class _Runner:
    """The model on one kind of pages, for one request at a time."""

    def __init__(self, model: TransformersModel, specs: ModelSpecs, window: int) -> None:
        self.model = model
        self.name = specs[0].name
        pages = -(-window // specs[0].cache.page_size)
        self.store = PageStore(new_layers(built(specs), pages, layers=model.num_layers))

    @property
    def bytes_per_token(self) -> int:
        pages = sum(layer.library.record.page_bytes() for layer in self.store.layers)
        return round(pages / self.store.page_size)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits (len(tokens), vocab_size) of a text that begins at position 0."""
        sequence = PagedSequence(self.store)
        sequence.reserve(len(tokens))
        step = build_step([Rows(sequence, tokens, sample=True)])
        every_row = replace(step, last_rows_S=step.positions_T)
        found = self.model.forward(every_row, self.store.layers)
        sequence.free()
        return found


def _windows(tokens: Sequence[int], window: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Starts and parts; a last part of one token predicts nothing and is left out."""
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        if len(part) > 1:
            yield start, part


def _loss(logits_SV: Tensor, next_S: Tensor) -> float:
    """Sum of -log p of the given next tokens."""
    from torch.nn import functional

    parts = zip(logits_SV.split(ROWS), next_S.split(ROWS), strict=True)
    return sum(float(functional.cross_entropy(a, b, reduction="sum").double()) for a, b in parts)


def _compare(want_SV: Tensor, got_SV: Tensor, sums: _Sums) -> None:
    for want, got in zip(want_SV.split(ROWS), got_SV.split(ROWS), strict=True):
        log_p, log_q = want.double().log_softmax(-1), got.double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        sums.kl += float(kl.sum())
        sums.largest = max(sums.largest, float(kl.max()))
        sums.same += int((want.argmax(-1) == got.argmax(-1)).sum())
