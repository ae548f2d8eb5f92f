"""What storing K and V in fewer bits costs a model: its next-token distributions against f32 pages.

The same text goes through the same model on each kind of pages, step by step together, each token given
(teacher forcing).
Paired distributions have little noise: a mean KL is meaningful after some hundred tokens, where
perplexities would need many thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError
from kvgen.models.calibrate import calibrate
from kvgen.models.runner import Runner
from kvgen.runtime.base import Tensor

if TYPE_CHECKING:
    from kvgen.models.adaptor import TransformersModel
    from kvgen.models.pages import ModelSpecs

Advance = Callable[[str, int, int], None]
"""Called with the name of the pages, the tokens done and their number."""

ROWS = 128
"""Rows of logits that are compared at once: bounds the memory for large vocabularies."""

ROWS_AT_ONCE = 512
"""Rows of a forward up to which contexts of short chunks run side by side: weights are read once for all."""


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
    bits: float
    """Bits of pages for each element of K and V: codes, scales and padding."""
    bits_at_context: float
    """Bits for each element of a request of ``context`` tokens: with its raw rows, and whole pages."""


@dataclass(frozen=True)
class Report:
    """A text through f32 pages and others."""

    model: str
    tokens: int
    context: int
    chunk: int
    perplexity: float
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
    context: int | None = None,
    chunk: int | None = None,
    advance: Advance = lambda pages, done, total: None,
) -> Report:
    """Run ``tokens`` through ``reference`` (f32 pages) and each of ``specs``, in contexts of so many tokens.

    The default is 512, or all positions of a model with fewer. Every context begins anew at position 0.
    ``chunk``: tokens of a context that go through the model together, the whole context by default. Blocks of
    tokens become codes at the end of a chunk's append, before its queries read them: with short chunks a
    query meets the recent tokens that a spec keeps, as in decoding. Contexts of short chunks run side by
    side. Scales and means that must be given are measured on the first context.
    Raises ``ArgumentError`` for a text or context that is too short or longer than the model's positions.
    """
    context = min(512, model.max_positions) if context is None else context
    if not 2 <= context <= model.max_positions:
        raise ArgumentError(f"context = {context}: give 2 to {model.max_positions} tokens")
    chunk = context if chunk is None else min(chunk, context)
    if chunk < 1:
        raise ArgumentError(f"chunk = {chunk}: give at least one token")
    if len(tokens) < 2:
        raise ArgumentError(f"text of {len(tokens)} tokens: give at least 2")
    contexts = list(_contexts(tokens, context))
    beside = min(len(contexts), max(1, ROWS_AT_ONCE // chunk))
    runners = []
    for spec in (reference, *specs):
        advance(f"{spec[0].name}: compiling", 0, len(tokens))
        given = calibrate(model, spec, contexts[0])
        runners.append(Runner(model, spec, given, context=context, beside=beside))
    ours = [_Sums() for _ in runners]
    done = rows = targets = 0
    for first in range(0, len(contexts), beside):
        group = contexts[first : first + beside]
        for runner in runners:
            runner.begin(len(group))
        for start in range(0, len(group[0]), chunk):
            parts = _parts(group, start, chunk)
            next_S = _next_tokens(group, start, parts)
            want_SV = None
            for runner, sums in zip(runners, ours, strict=True):
                advance(runner.name, done, len(tokens))
                got_SV = runner.logits(parts)
                sums.loss += _loss(got_SV, next_S)
                if want_SV is None:
                    want_SV = got_SV
                else:
                    _compare(want_SV, got_SV, sums)
            done += len(next_S)
            rows += len(next_S)
            targets += int((next_S >= 0).sum())
    return Report(
        model=name,
        tokens=rows,
        context=context,
        chunk=chunk,
        perplexity=math.exp(ours[0].loss / targets),
        rows=tuple(
            Row(
                pages=runner.name,
                kl_nats=sums.kl / rows,
                kl_largest=sums.largest,
                top1_agreement=sums.same / rows,
                perplexity=math.exp(sums.loss / targets),
                bits=runner.bits(),
                bits_at_context=runner.bits(context),
            )
            for runner, sums in zip(runners[1:], ours[1:], strict=True)
        ),
    )


def _contexts(tokens: Sequence[int], context: int) -> Iterator[Sequence[int]]:
    """Parts of the text; a last one of one token predicts nothing and is left out."""
    for start in range(0, len(tokens), context):
        part = tokens[start : start + context]
        if len(part) > 1:
            yield part


def _parts(group: Sequence[Sequence[int]], start: int, chunk: int) -> list[tuple[int, Sequence[int]]]:
    """(context, tokens) of those that have tokens left, short ones first as a step wants them."""
    parts = [(at, tokens[start : start + chunk]) for at, tokens in enumerate(group) if start < len(tokens)]
    return sorted(parts, key=lambda part: len(part[1]))


def _next_tokens(
    group: Sequence[Sequence[int]], start: int, parts: Sequence[tuple[int, Sequence[int]]]
) -> Tensor:
    """What follows each row of a step (rows,) int64; -1 for the last row of a context."""
    import torch

    found: list[int] = []
    for at, tokens in parts:
        found += [*group[at], -1][start + 1 : start + 1 + len(tokens)]
    return torch.tensor(found)


def _loss(logits_SV: Tensor, next_S: Tensor) -> float:
    """Sum of -log p of the given next tokens; -1 is none."""
    from torch.nn import functional

    total = 0.0
    for logits, following in zip(logits_SV.split(ROWS), next_S.split(ROWS), strict=True):
        losses = functional.cross_entropy(logits, following, reduction="none", ignore_index=-1)
        total += float(losses.double().sum())
    return total


def _compare(want_SV: Tensor, got_SV: Tensor, sums: _Sums) -> None:
    for want, got in zip(want_SV.split(ROWS), got_SV.split(ROWS), strict=True):
        log_p, log_q = want.double().log_softmax(-1), got.double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        sums.kl += float(kl.sum())
        sums.largest = max(sums.largest, float(kl.max()))
        sums.same += int((want.argmax(-1) == got.argmax(-1)).sum())
