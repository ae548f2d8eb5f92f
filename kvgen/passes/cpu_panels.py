"""Panels: when K and V are read with lanes along the keys, and what the micro-kernels are made of.

A panel of K keeps ``inner`` elements of neighbouring keys side by side (``d/i tok d%i``), one of V keeps
``inner`` keys of an element side by side (``tok/i d tok%i``): what one instruction multiplies and adds.
The layout decides; where it holds no panel, vectors run along d (``cpu_attention``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.ir import PageRecord, Spec, Target
from kvgen.passes.address import Address
from kvgen.passes.cpu_text import C_TYPES
from kvgen.passes.integers import FloorDiv

LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class Part:
    """The operands that one loaded vector holds: itself, or the low or high codes of int4."""

    suffix: str
    """Of the names of its variables."""
    take: str
    """The operand, from the loaded vector ``x``."""
    offset: str = ""
    """Elements from the vector's own place in a row to the part's; empty for none."""
    start: str = ""
    """Where its starting sums begin (K in blocks of d)."""
    weights: str = ""
    """Where its weights begin (V in blocks of d)."""
    factors: str = ""
    """Where the factors on its sums begin (V in blocks of d)."""


@dataclass(frozen=True)
class Panel:
    """One side read as panels. Texts are C++."""

    inner: int
    """Elements that one instruction multiplies and adds into a lane."""
    type: str
    """Type of a stored element."""
    factor_type: str
    """Type of what it is multiplied by: prepared queries, or weights."""
    operand: str
    load: str
    splat: str
    dot: str
    """With %s for its two factors (unsigned codes first) and the sum."""
    add: str
    """With %s for two sums."""
    sum_type: str
    score_type: str
    to_f32: str
    integer: bool
    """Whether sums are int32: stored codes meet int8 digits of the query or uint8 digits of the weights."""
    parts: tuple[Part, ...]
    steps: int
    """Vectors along d (K)."""
    stride: str
    """Elements from one step of d (K) or of ``inner`` keys (V) to the next."""
    lane_stride: str
    """Elements from one lane to the next: ``inner`` by its name."""
    blocks: int
    """Blocks of d that have a scale each; 1 where a row has one or none."""
    block_steps: int
    """Steps of d of a block."""
    line_steps: int
    """Steps of d (K) in a line of memory."""
    line_vectors: int
    """Neighbouring vectors in a line of memory."""


def integer_side(spec: Spec, target: Target, side: str) -> bool:
    """Whether codes are multiplied as integers: 8-bit instructions, and a query that two int8 digits hold."""
    mode = spec.attention.qk if side == "k" else spec.attention.pv
    able = "vnni" in target.features and spec.cache.quant(side).fmt.integer
    return able and (mode == "int8" or spec.attention.q_dtype != "f32")


def digits(spec: Spec, side: str) -> int:
    """Digits of 8 bits that carry a query (K) or a weight (V): one where ``int8`` is asked for, else two."""
    return 1 if (spec.attention.qk if side == "k" else spec.attention.pv) == "int8" else 2


def k_panel(
    spec: Spec, record: PageRecord, target: Target, address: Address, lanes: int, pairs: bool
) -> Panel | None:
    """K as panels, or None where vectors of keys do not lie side by side in its pages.

    ``pairs``: whether bf16 pairs are multiplied without conversion.
    """
    integer = integer_side(spec, target, "k")
    inner = _inner(integer, pairs)
    if spec.cache.k.fmt.packed > 1 and not integer:
        return None
    outer = [term for term in address.of("d") if inner == 1 or isinstance(term.index, FloorDiv)]
    if address.stride("tok") != inner or spec.cache.page_size % lanes or len(outer) != 1:
        return None
    if outer[0].stride in (None, 1) or (inner > 1 and int(outer[0].index.args[1]) != inner):
        return None
    if inner == 1 and address.stride("d") is None:
        return None
    plane = record.plane("k")
    quant = spec.cache.k
    width = spec.attention.head_dim // quant.fmt.packed
    vector = lanes * inner * plane.itemsize
    row = outer[0].stride * plane.itemsize
    blocks = spec.attention.head_dim // quant.d_block if quant.d_block else 1
    packed = quant.fmt.packed == 2
    if packed:
        high = Part("_high", "high_biased(x)", str(width), f"(block + {blocks // 2}) * ROW_BLOCK + ")
        parts: tuple[Part, ...] = (Part("_low", "low_biased(x)", start="block * ROW_BLOCK + "), high)
    else:
        parts = (Part("", "biased(x)" if integer else "x", start="block * ROW_BLOCK + "),)
    return Panel(
        inner=inner,
        type=C_TYPES[quant.fmt.storage],
        factor_type="int8_t" if integer else "uint16_t" if pairs else "float",
        operand=_OPERAND[inner],
        load=_load(inner, quant.fmt.storage),
        splat=_SPLAT[inner],
        dot=_DOT[inner],
        add="add_quads(%s, %s)" if integer else "%s + %s",
        sum_type="vquads" if integer else "vf",
        score_type="int32_t" if integer and blocks == 1 else "float",
        to_f32="to_f32(%s)" if integer else "%s",
        integer=integer,
        parts=parts,
        steps=width // inner,
        stride=outer[0].stride_name,
        lane_stride=address.of("tok")[0].stride_name,
        blocks=blocks,
        block_steps=quant.d_block // inner if quant.d_block else width // inner,
        line_steps=max(1, LINE // vector) if row == vector else 1,
        line_vectors=1 if row == vector else max(1, LINE // vector),
    )


def v_panel(
    spec: Spec, record: PageRecord, target: Target, address: Address, lanes: int, pairs: bool
) -> Panel | None:
    """V as panels of more than one key, or None where the layout has none."""
    integer = integer_side(spec, target, "v")
    inner = _inner(integer, pairs)
    outer = [term for term in address.of("tok") if isinstance(term.index, FloorDiv)]
    if inner == 1 or address.stride("d") != inner or len(outer) != 1 or outer[0].stride is None:
        return None
    if int(outer[0].index.args[1]) != inner or spec.cache.page_size % inner:
        return None
    quant = spec.cache.v
    blocks = spec.attention.v_head_dim // quant.d_block if quant.d_block else 1
    width = spec.attention.v_head_dim // quant.fmt.packed
    if quant.fmt.packed == 2:
        apart = f"{blocks // 2} * ROW_BLOCK" if blocks > 1 else ""
        high = Part(
            "_high",
            "high_codes(x)",
            str(-(-width // lanes) * lanes),  # whole vectors of sums for each half
            weights=f"{apart} * TILE_PAD" if apart else "",
            factors=apart,
        )
        parts: tuple[Part, ...] = (Part("_low", "low_codes(x)"), high)
    else:
        parts = (Part("", "x"),)
    return Panel(
        inner=inner,
        type=C_TYPES[quant.fmt.storage],
        factor_type="uint8_t" if integer else "uint16_t",
        operand=_OPERAND[inner],
        load=_load(inner, quant.fmt.storage),
        splat=_SPLAT[inner],
        dot=_DOT[inner],
        add="add_quads(%s, %s)" if integer else "%s + %s",
        sum_type="vquads" if integer else "vf",
        score_type="float",
        to_f32="to_f32(%s)" if integer else "%s",
        integer=integer,
        parts=parts,
        steps=width,
        stride=outer[0].stride_name,
        lane_stride=address.of("d")[0].stride_name,
        blocks=blocks,
        block_steps=quant.d_block or width,
        line_steps=1,
        line_vectors=max(1, LINE // (lanes * inner * record.plane("v").itemsize)),
    )


def _inner(integer: bool, pairs: bool) -> int:
    return 4 if integer else 2 if pairs else 1


def _load(inner: int, storage: str) -> str:
    return {1: f"load_{storage}", 2: "load_pairs", 4: "load_quads"}[inner]


_OPERAND: Mapping[int, str] = {1: "vf", 2: "vpairs", 4: "vquads"}
_SPLAT: Mapping[int, str] = {1: "splat", 2: "splat_pair", 4: "splat_quad"}
_DOT: Mapping[int, str] = {
    1: "fma(%s, %s, %s)",
    2: "dot_pairs(%s, %s, %s)",
    4: "dot_quads(%s, %s, %s)",
}
