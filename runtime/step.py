"""Step: one forward pass of a ragged batch, as the tensors that a model and the ops take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvgen.runtime.base import Tensor
from kvgen.runtime.sequence import PagedSequence

DECODE_ROWS = 8
"""Requests with at most so many query rows run in ``decode``, those with more in ``prefill``."""


@dataclass(frozen=True)
class Rows:
    """What one request computes in a step: its newest tokens, for which its sequence has room already."""

    sequence: PagedSequence
    tokens: Sequence[int]
    """Ids of the last ``len(tokens)`` tokens of ``sequence``; at least one."""
    sample: bool
    """Whether the logits of the last row are wanted."""


@dataclass(frozen=True)
class Part:
    """The requests of a step that go to one op, as that op's arguments."""

    rows: slice
    """Of the step's rows."""
    requests: slice
    """Of the step's requests."""
    page_table_BP: Tensor
    kv_lens_B: Tensor
    q_starts_B1: Tensor


@dataclass(frozen=True)
class Step:
    """One forward pass of a ragged batch: rows of all requests one after another, those with few first."""

    tokens_T: Tensor
    """int64, token ids."""
    positions_T: Tensor
    """int64, logical position of each row in its request."""
    slots_T: Tensor
    """int64, where the row's K and V go."""
    page_table_BP: Tensor
    """int32, as wide as the longest request needs; what stands behind a request's pages means nothing."""
    kv_lens_B: Tensor
    """int32, keys after this step's append."""
    q_starts_B1: Tensor
    """int32, the first row of each request."""
    num_decode: int
    """The first so many requests go to ``decode``, the others to ``prefill``."""
    last_rows_S: Tensor
    """int64, rows whose logits are wanted, in the order of the requests that sample; may be empty."""
    decode_rows: int
    """Rows of the first ``num_decode`` requests; known here so that it is not read back from a GPU."""

    @cached_property
    def positions32_T(self) -> Tensor:
        """``positions_T`` as int32, which an append that rotates takes."""
        return self.positions_T.int()

    @cached_property
    def decode_part(self) -> Part | None:
        """The arguments of ``decode``, or None."""
        n = self.num_decode
        if not n:
            return None
        rows, own = slice(0, self.decode_rows), slice(0, n)
        return Part(rows, own, self.page_table_BP[:n], self.kv_lens_B[:n], self.q_starts_B1[: n + 1])

    @cached_property
    def prefill_part(self) -> Part | None:
        """The arguments of ``prefill``, or None."""
        n = self.num_decode
        if n == len(self.kv_lens_B):
            return None
        rows, own = slice(self.decode_rows, len(self.tokens_T)), slice(n, len(self.kv_lens_B))
        starts = self.q_starts_B1[n:] - self.decode_rows
        return Part(rows, own, self.page_table_BP[n:], self.kv_lens_B[n:], starts)


TABLE_STEP = 16
"""Columns by which a page table grows: a call whose shapes were seen before is much quicker."""


def build_step(batch: Sequence[Rows], device: Any = "cpu") -> Step:
    """Pack what each request computes into a Step; give requests with few rows first (``DECODE_ROWS``)."""
    import torch

    page = batch[0].sequence.store.page_size
    counts = np.array([len(rows.tokens) for rows in batch])
    lens = np.array([rows.sequence.length for rows in batch])
    width = max(rows.sequence.num_pages for rows in batch)
    table = np.zeros((len(batch), -(-width // TABLE_STEP) * TABLE_STEP), np.int32)
    for row, rows in zip(table, batch, strict=True):
        row[: rows.sequence.num_pages] = rows.sequence.table
    starts = np.zeros(len(batch) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    owner = np.repeat(np.arange(len(batch)), counts)
    positions = np.arange(starts[-1]) + (lens - starts[1:])[owner]
    slots = table[owner, positions // page].astype(np.int64) * page + positions % page
    # Rows of a later request with few rows are rows of a prefill, which takes any number.
    num_decode = next((at for at, count in enumerate(counts) if count > DECODE_ROWS), len(batch))
    samples = np.flatnonzero([rows.sample for rows in batch])

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Step(
        tokens_T=tensor(np.array([token for rows in batch for token in rows.tokens], np.int64)),
        positions_T=tensor(positions),
        slots_T=tensor(slots),
        page_table_BP=tensor(table),
        kv_lens_B=tensor(lens.astype(np.int32)),
        q_starts_B1=tensor(starts.astype(np.int32)),
        num_decode=num_decode,
        last_rows_S=tensor(starts[samples + 1] - 1),
        decode_rows=int(starts[num_decode]),
    )
