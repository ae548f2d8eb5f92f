"""Runner: a model on one kind of pages, given every token, and what those pages cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgen.models.kernels import built
from kvgen.runtime.base import Tensor
from kvgen.runtime.layers import new_layers
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import Rows, build_step

if TYPE_CHECKING:
    from kvgen.models.adaptor import TransformersModel
    from kvgen.models.calibrate import Given
    from kvgen.models.pages import ModelSpecs


class Runner:
    """The model on one kind of pages, for requests that grow side by side."""

    def __init__(
        self, model: TransformersModel, specs: ModelSpecs, given: Given, *, context: int, beside: int
    ) -> None:
        self.model = model
        self.name = specs[0].name
        pages = -(-context // specs[0].cache.page_size) * beside
        kernels = built(specs)
        self.store = PageStore(
            new_layers(kernels, pages, layers=model.num_layers, scales=given.scales, means=given.means)
        )
        self.sequences: list[PagedSequence] = []

    def begin(self, requests: int) -> None:
        """Forget all requests and begin so many."""
        for sequence in self.sequences:
            sequence.free()
        self.sequences = [PagedSequence(self.store) for _ in range(requests)]

    def logits(self, parts: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Logits (tokens, vocab_size) of the next tokens of some requests, given as (request, tokens)."""
        for request, tokens in parts:
            self.sequences[request].reserve(len(tokens))
        step = build_step([Rows(self.sequences[request], tokens, sample=True) for request, tokens in parts])
        every_row = replace(step, last_rows_S=step.positions_T.new_tensor(range(len(step.tokens_T))))
        return self.model.forward(every_row, self.store.layers)

    def bits(self, length: int | None = None) -> float:
        """Bits for each element of K and V in all layers: of pages, or of a request of ``length`` tokens."""
        used = elements = 0.0
        for layer in self.store.layers:
            cost, raw = layer.library.footprint, layer.library.spec.cache.raw
            elements += cost.elements * (length or 1)
            if length is None:
                used += cost.token_bytes
            else:
                used += cost.request_bytes(length, len(raw.pages(length)) if raw else 0)
        return 8 * used / elements
