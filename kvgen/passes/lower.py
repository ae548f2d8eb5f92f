"""What every plan shares: d-parts, simplified addresses, and where each scale folds in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from kvgen.ir import PageRecord, Spec
from kvgen.ir.plan import Constant, Fact, Part
from kvgen.passes.address import Address, Term, address, plane_facts, simplify
from kvgen.passes.integers import FloorDiv, Mod, symbol
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


def stride_constants(addresses: Mapping[str, Address], units: Mapping[str, str]) -> tuple[Constant, ...]:
    """The constant strides that addresses name (a stride of one is never printed), each once.

    ``units``: what the strides of a plane count; elements where it says nothing.
    """
    # Addresses of a V that is a part of K are K's.
    found = (
        Constant(term.stride_name, term.stride, _step(term, units.get(name, "elements")))
        for name, where in addresses.items()
        for term in where.terms
        if term.stride is not None and term.stride != 1
    )
    return tuple({constant.name: constant for constant in found}.values())


def plane_units(record: PageRecord) -> dict[str, str]:
    """What the strides of each plane count."""
    return {plane.name: plane.unit for plane in record.planes + record.raw}


def _step(term: Term, unit: str) -> str:
    """What one step of a term means: ``elements from one token to the next``."""
    dim = {"tok": "token", "d": unit.removesuffix("s")}.get(term.dim, term.dim)
    of = " of d" if term.dim == "d" else ""
    index, step, within = term.index, f"{dim}{of}", ""
    if isinstance(index, FloorDiv):
        step = f"block of {index.args[1]} {dim}s{of}"
        index = index.args[0]
    if isinstance(index, Mod):
        within = f", within {index.args[1]}"
    return f"{unit} from one {step} to the next{within}"


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
