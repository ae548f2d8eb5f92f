"""What prefill asks the plan on the CPU: the panels of K and V, and how their rows become one.

Every row block of a unit reads the same panels, so bringing a tile into the form that the products want costs
little, whatever its layout and format. Codes are multiplied as they are (they are exact in bf16), and scales
meet the scores and the weights: nothing is dequantised. Formats without operands of their own become f32
numbers instead, as they go into the panels (``cpu_values``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgen.ir import Spec, Target, rules
from kvgen.ir.plan import Constant
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.passes.abi import PREFIX
from kvgen.passes.cpu_attention import LANES, LOG2E, Answers, Inputs
from kvgen.passes.cpu_codec import RowField, codec_answers, row_field, row_reading, row_writing
from kvgen.passes.cpu_prefill_terms import term_answers
from kvgen.passes.cpu_raw import raw_constants
from kvgen.passes.cpu_rope import Rotation, rotation
from kvgen.passes.cpu_sides import fold
from kvgen.passes.cpu_text import C_TYPES, writing
from kvgen.passes.cpu_values import ValueRow, value_answers, value_row
from kvgen.passes.terms import masking

VECTORS = {"avx512": 4, "avx2": 2, "portable": 2}
"""Column vectors of a product whose sums, with those of a few rows, fill the registers of each ISA row."""

EXACT_IN_BF16 = ("bf16", "int8", "int4x2", "e4m3")
"""Storage types whose elements bf16 holds without rounding."""


@dataclass(frozen=True)
class PanelSide:
    """K or V as the products of prefill read it."""

    field: RowField
    """The stored row."""
    words: int
    """Elements in a word of 32 bits: 2 for bf16 pairs, 1 for f32."""
    copied: bool
    """Whether a row is decoded before it goes into a panel, not read in place."""
    column: bool
    """Whether each key has a scale of its own."""
    blocks: int
    """Blocks of d that have a scale each; 1 where a row has one or none."""
    block: int
    """Elements of such a block."""
    rough: bool
    """Whether a value may be inf or NaN where some row does not see it."""
    chunks: tuple[dict[str, int], ...]
    """V: parts of d whose sums fit the registers: first element, vectors, block."""
    plane: str
    """Name of the plane of its rows: ``k`` for a V that is part of K."""
    shared: bool
    """V: whether it goes into its panel from the rows of K that are at hand for theirs."""
    turn: Rotation | None
    """K: how a row is rotated to its position when it is read."""
    value: ValueRow | None
    """How a row is read where it becomes numbers, scales and all."""

    @property
    def dtype(self) -> str:
        """Type of an element of the panel."""
        return "bf16" if self.words == 2 else "f32"

    @property
    def type(self) -> str:
        """C++ type of it."""
        return C_TYPES[self.dtype]

    @property
    def operand(self) -> str:
        """C++ type of a vector of the panel."""
        return "vpairs" if self.words == 2 else "vf"

    @property
    def load(self) -> str:
        """Function that loads one."""
        return "load_pairs" if self.words == 2 else "load_f32"

    @property
    def bits(self) -> str:
        """C++ type of the bits of an element."""
        return "uint16_t" if self.words == 2 else "uint32_t"

    @property
    def exponent(self) -> str:
        """Bits that are all ones in an inf or NaN."""
        return "0x7f80" if self.words == 2 else "0x7f800000"

    @property
    def decoded(self) -> bool:
        """Whether a row of V is decoded: one of f32 goes into the panel as it is."""
        return (self.copied or self.words == 1) and not self.shared

    @property
    def scales(self) -> str:
        """Where the scales of a tile stand."""
        return f"{self.plane if self.shared else 'v'}_scale"

    @property
    def scaled_rows(self) -> bool:
        """Whether scales are multiplied into a row: the rotation mixes elements of several blocks."""
        return self.turn is not None and self.field.block > 0 and self.value is None

    @property
    def static(self) -> bool:
        """Whether one factor, which is given, is on all that the panel holds."""
        return self.field.static and self.value is None

    @property
    def fetched(self) -> bool:
        """Whether the rows of the tile to come are lines that can be fetched ahead."""
        return self.field.contiguous and self.value is None

    def helpers(self) -> set[str]:
        """Names of the codec helpers that decoding a row needs."""
        if self.value:
            return self.value.scalars
        if self.field.storage == self.dtype:
            return set()
        return row_reading(self.field.storage) | (writing("bf16") if self.words == 2 else set())


def prefill_answers(given: Inputs) -> Answers:
    """Constants and answers of the prefill template."""
    spec, schedule, target = given.spec, given.schedule, given.target
    att, lanes, vectors = spec.attention, LANES[target.arch], VECTORS[target.arch]
    row_block, tile = schedule.int("row_block"), schedule.int("tile")
    q_tile = max(1, schedule.int("rows") // att.group)
    k, v = panel_sides(given)
    prefix = given.variant == PREFIX
    term_constants, terms = term_answers(spec, prefix=prefix)
    quantised = att.qk == "int8"
    constants = [
        Constant("GROUP", att.group, "query heads that share a KV head"),
        Constant("TILE", tile, "keys between two softmax steps"),
        Constant("Q_TILE", q_tile, "queries of a unit of work"),
        Constant("ROW_BLOCK", row_block, "query rows that the inner kernels take at once"),
        Constant("STATES", _round_up(row_block, lanes), "query rows of a block, rounded up to whole vectors"),
        Constant("COLUMNS", vectors * lanes, "keys of a panel of K"),
        Constant("K_WORDS", _round_up(att.head_dim // k.words, lanes), "words of a key in such a panel"),
        Constant("V_WORDS", _round_up(att.v_head_dim, v.words * lanes), "words of a row of the panel of V"),
        Constant("V_PITCH", _round_up(att.v_head_dim, lanes), "elements of an accumulator row"),
    ]
    values = tuple(side.value for side in (k, v) if side.value and not side.shared)
    constants += (*term_constants, *(k.turn.constants if k.turn else ()), *raw_constants(spec))
    if att.sink and not prefix:
        constants.append(Constant("LOG2E", LOG2E, "natural units to those of base 2"))
    if quantised:
        constants.append(Constant("SMALLEST_AMAX", ZERO_BLOCK_AMAX, "a row below this is zero"))
    helpers = k.helpers() | v.helpers() | row_writing(att.q_dtype) | {"no_infinity"}
    helpers |= row_reading(att.q_dtype) if quantised or att.q_dtype != k.dtype else set()
    if quantised:
        helpers |= {"find_scale", "to_integer"} | (writing("bf16") if k.words == 2 else set())
    answers: dict[str, Any] = {
        "isa_file": f"cpp/_isa_{target.arch}.jinja",
        "prefill_file": f"cpp/_isa_prefill_{target.arch}.jinja",
        "panel_names": _panel_names(k, v),
        "k_side": k,
        "v_side": v,
        # Rows in pieces have no line of their own to fetch.
        "prefetch_next": schedule.int("prefetch") == 1 and (k.fetched or v.fetched),
        "ignored": () if k.fetched or v.fetched else ("prefetch",),
        "values": bool(values),
        "raw": spec.cache.raw,
        **value_answers(values, target),
        "c_types": C_TYPES,
        "vectors": vectors,
        "fewer_vectors": list(range(1, vectors)),
        "q_tile": q_tile,
        "q_type": C_TYPES[att.q_dtype],
        "q_quantised": quantised,
        "score_scale": _score_scale(spec, k),
        "ragged": True,
        "rules": rules,
        **terms,
        **codec_answers(target, helpers),
    }
    return tuple(constants), answers


def panel_sides(given: Inputs) -> tuple[PanelSide, PanelSide]:
    """K and V: bf16 pairs where the CPU multiplies them and nothing is rounded that the spec wants exact."""
    spec, turn = given.spec, rotation(given.spec.attention, "pre")
    words = [2 if multiplies_pairs(spec, given.target, side) else 1 for side in ("k", "v")]
    if turn:
        words[0] = 1  # rotated, a key has more bits than bf16
    shared = spec.cache.alias and not turn
    if shared:
        words = [min(words)] * 2
    return _side(given, "k", words[0], False, turn), _side(given, "v", words[1], shared, None)


def _side(given: Inputs, side: str, words: int, shared: bool, turn: Rotation | None) -> PanelSide:
    spec, target = given.spec, given.target
    att, field, site = spec.attention, row_field(given, side), fold(spec, side)
    seen = masking(spec, prefix=given.variant == PREFIX)
    width = att.head_dim if side == "k" else att.v_head_dim
    lanes, vectors = LANES[target.arch], VECTORS[target.arch]
    # A row is read in place where whole vectors hold it as the panel wants it.
    in_place = field.contiguous and width % (words * lanes) == 0
    same = field.storage == ("bf16" if words == 2 else "f32")
    block = width if turn else min(site.block or width, width)
    value = None if spec.direct(side) else value_row(spec, given.addresses, side)
    return PanelSide(
        field=field,
        words=words,
        copied=not (same and in_place) or turn is not None or value is not None,
        column=site.site in ("score_column", "weight_column") and not (turn and site.block),
        blocks=-(-width // block),
        block=block,
        rough=side == "v" and seen.predicate is not None and bool(value or not spec.cache.v.fmt.integer),
        chunks=_chunks(width, block, lanes, vectors) if side == "v" else (),
        plane="k" if spec.cache.alias else side,
        shared=shared,
        turn=turn,
        value=value,
    )


def multiplies_pairs(spec: Spec, target: Target, side: str) -> bool:
    """Whether K meets the query, or V the weights, as bf16 pairs.

    The stored elements must be exact in bf16, and so must be the query; weights may be rounded to bf16 where
    the result is, or where 8 bits are all that is asked for.
    """
    if not spec.direct(side):
        return False
    att = spec.attention
    loose = att.qk == "int8" if side == "k" else att.pv == "int8"
    exact = spec.cache.quant(side).fmt.storage in EXACT_IN_BF16
    return "bf16" in target.features and exact and (loose or att.q_dtype == "bf16")


def _chunks(width: int, block: int, lanes: int, vectors: int) -> tuple[dict[str, int], ...]:
    found = []
    for first in range(0, width, block):
        end = min(first + block, width)
        for start in range(first, end, vectors * lanes):
            left = -(-(end - start) // lanes)
            found.append({"start": start, "count": min(vectors, left), "block": first // block})
    return tuple(found)


def _panel_names(k: PanelSide, v: PanelSide) -> list[str]:
    """Helpers of the ISA row's own file."""
    names = ["panel_f32"] if 1 in (k.words, v.words) else []
    names += ["panel_pairs"] if 2 in (k.words, v.words) else []
    if v.words == 2:
        names += ["weights_pairs", "weave_pairs", *(["half_pairs"] if v.rough else [])]
    return names


def _score_scale(spec: Spec, k: PanelSide) -> str:
    if not k.static:
        return "(float)a.score_scale"
    assert k.field.scale is not None
    return f"(float)a.score_scale * a.k_scale[{k.field.scale.c(head='u.head')}]"


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
