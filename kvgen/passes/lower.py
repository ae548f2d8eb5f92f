"""What every plan shares: d-parts, simplified addresses, and where each scale folds in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from kvgen.ir import PageRecord, Spec
from kvgen.ir.plan import Constant, Fact, Part
from kvgen.passes.address import Address, Term, address, plane_facts, simplify
from kvgen.passes.integers import symbol
from kvgen.passes.verify_address import verify_address


@dataclass(frozen=True)
class FoldSite:
    """Where the scale of K or V enters. No codec multiplies a tile by itself."""

    site: str
    """K: ``score_scale`` (one factor for a head) or ``score_column`` (one a key).
    V: ``output`` (one factor for a head) or ``weight_column`` (one a key). ``none`` for plain floats."""
    per_head: bool = False
    """Whether the scale differs by head."""
    block: int = 0
    """Elements of d that share a scale; 0 where one serves the whole row. Each block of d is then a dot of
    its own (K), or an accumulator with weights of its own (V)."""


def fold_site(spec: Spec, field: str) -> FoldSite:
    """The cheapest exact place for the scales of ``k`` or ``v``."""
    quant = spec.cache.quant(field)
    if not quant.fmt.scaled:
        return FoldSite("none")
    per_head = "head" in quant.scale_dims
    if quant.static_scale:
        return FoldSite("score_scale" if field == "k" else "output", per_head)
    return FoldSite("score_column" if field == "k" else "weight_column", per_head, quant.d_block or 0)


def d_parts(size: int, widest: int, step: int) -> tuple[Part, ...]:
    """Cut ``size`` elements into tiles: powers of two from ``widest`` down to ``step``.

    Only the last tile may be padded: 72 with step 16 is 64 + 8 of 16; 576 is 512 + 64.
    """
    parts: list[Part] = []
    start = 0
    while start < size:
        left = size - start
        width = widest
        while width > step and width > left:
            width //= 2
        parts.append(Part(start, width, min(width, left)))
        start += width
    return tuple(parts)


@lru_cache(maxsize=64)
def lower_addresses(spec: Spec, record: PageRecord) -> Mapping[str, Address]:
    """The simplified address of every plane, and of the static scales that lie outside the pages."""
    found: dict[str, Address] = {}
    for plane in record.planes + record.raw:
        found[plane.name] = simplify(address(plane), plane_facts(plane))
        verify_address(plane, found[plane.name])
    last_head = spec.attention.kv_heads - 1
    for name, _, per_head in spec.given_scales():
        head = Term("head", symbol("head"), f"{name}_STRIDE_HEAD".upper(), 1, False, last_head)
        found[name] = Address(name, (head,) if per_head else ())
    if spec.cache.alias:
        found |= {f"v{name[1:]}": where for name, where in found.items()}
    return MappingProxyType(found)


def stride_constants(addresses: Mapping[str, Address]) -> tuple[Constant, ...]:
    """The constant strides that addresses name (a stride of one is never printed)."""
    return tuple(
        Constant(term.stride_name, term.stride, f"elements from one {term.dim} index to the next")
        for found in addresses.values()
        for term in found.terms
        if term.stride is not None and term.stride != 1
    )


def address_facts(record: PageRecord, addresses: Mapping[str, Address]) -> tuple[Fact, ...]:
    """What ``explain`` says of each plane: alignment and the proven width of each term."""
    facts = []
    for plane in record.planes:
        pitch = plane.page.stride
        facts.append(
            Fact(f"{plane.name} starts on {record.align} bytes", f"offset {plane.offset}, page pitch {pitch}")
        )
        for term in addresses[plane.name].terms:
            bits = 64 if term.wide else 32
            why = (
                "page ids and strides are passed at run time"
                if term.limit is None
                else f"at most {term.limit}"
            )
            facts.append(Fact(f"{plane.name}: {term.index} * {term.stride_name} is {bits}-bit", why))
    return tuple(facts)
