"""footprint: the true bytes of a cache, scales and padding included; raw rows are told apart."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir import PageRecord, Spec

SCALES = ("_scale", "_min")
"""Ends of the names of planes that hold scales."""


@dataclass(frozen=True)
class Footprint:
    """What tokens cost in pages, and what those that are left unquantised cost beside."""

    elements: int
    """Elements of K and V of one token, all KV heads (of K alone where V is a part of it)."""
    page_size: int
    codes: float
    """Bytes of codes for each token of a page."""
    scales: float
    """Bytes of scales and minima for each token of a page; those that are given lie outside."""
    padding: float
    """Bytes of pages that hold neither, for each token."""
    raw_row: int
    """Bytes of a raw row, which one page's tokens take; 0 where no token is left unquantised."""

    @property
    def token_bytes(self) -> float:
        """Bytes of pages for each token."""
        return self.codes + self.scales + self.padding

    @property
    def bits(self) -> float:
        """Bits of pages for each element."""
        return 8 * self.token_bytes / self.elements

    @property
    def code_bits(self) -> float:
        """Bits of codes and scales for each element, without padding."""
        return 8 * (self.codes + self.scales) / self.elements

    def request_bytes(self, length: int, raw_pages: int = 0) -> float:
        """Bytes that one request of ``length`` tokens holds, ``raw_pages`` of its pages with a raw row
        (``RawSpec.pages``)."""
        pages = -(-length // self.page_size)
        return pages * self.page_size * self.token_bytes + raw_pages * self.raw_row


def footprint(spec: Spec, record: PageRecord) -> Footprint:
    """The footprint of one layer of a cache."""
    att, size = spec.attention, spec.cache.page_size
    widths = {"k": att.head_dim, "v": att.v_head_dim}
    held = {True: 0, False: 0}
    for plane in record.planes:
        items = 1
        for placed in plane.axes:
            items *= placed.extent or 1
        held[plane.name.endswith(SCALES)] += items * plane.itemsize
    padding = record.page_bytes() - held[True] - held[False]
    raw_row = record.raw_bytes()
    elements = att.kv_heads * sum(widths[field] for field in spec.cache.fields)
    return Footprint(elements, size, held[False] / size, held[True] / size, padding / size, raw_row)
