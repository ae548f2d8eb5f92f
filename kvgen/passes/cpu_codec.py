"""What append and gather ask the plan on the CPU: how a row of K or V is encoded, decoded and laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvgen.ir import PageRecord, Spec, Target, rules
from kvgen.ir.plan import Constant
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.passes.address import Address
from kvgen.passes.cpu_attention import Answers, Inputs
from kvgen.passes.cpu_encode import EncodePart, encode_parts
from kvgen.passes.cpu_raw import raw_constants
from kvgen.passes.cpu_rope import rotation
from kvgen.passes.cpu_text import C_TYPES, SCALE_HELPERS, from_f32, reading, to_f32, writing
from kvgen.passes.cpu_values import ValueRow, value_answers, value_row

VECTORISED = {"avx512": ("round_int8", "round_e4m3"), "avx2": ("round_int8",), "portable": ()}
"""Roundings that each ISA row has instructions for; the others go number by number."""


@dataclass(frozen=True)
class RowField:
    """A row of K or V (one token of one head) as it is stored."""

    storage: str
    """Storage type, a key of ``DTYPE_BYTES``."""
    type: str
    """C++ type of a stored element."""
    width: str
    """Constant that counts its numbers: HEAD_DIM or V_HEAD_DIM."""
    elements: str
    """C++ text of its stored elements: half as many where codes are packed in pairs."""
    address: Address
    """Of an element; d counts stored elements."""
    run: int
    """Elements along d that lie side by side in a page."""
    together: int
    """Tokens whose rows lie element beside element, where that makes vectors of a few of them; else 1."""
    scaled: bool
    """Whether elements are codes of a scale."""
    static: bool
    """Whether the scale is given, not found."""
    scale: Address | None
    """Of the scale; d counts numbers."""
    block: int
    """Numbers that share a scale where a row has several scales, else 0."""
    qmax: float | None
    """Largest code."""

    @property
    def contiguous(self) -> bool:
        """Whether the whole row lies side by side."""
        return self.run == 0

    @property
    def packed(self) -> bool:
        """Whether a stored element holds two codes."""
        return self.storage == "int4x2"

    @property
    def rounding(self) -> str:
        """Function that rounds numbers to codes where the scale was made for them."""
        return "round_e4m3" if self.storage == "e4m3" else "round_int8"

    def encode(self, text: str) -> str:
        """The code of ``text``, a float expression that was divided by a scale that was given."""
        return f"f32_to_e4m3({text})" if self.storage == "e4m3" else f"to_integer<{self.qmax}>({text})"

    def encoders(self, dtype: str, arch: str) -> set[str]:
        """Names of the helpers that storing rows of ``dtype`` needs on an ISA row."""
        if self.storage == dtype:
            return set()
        found = row_reading(dtype)
        if not self.scaled:
            return found | row_writing(self.storage)
        one_by_one = "f32_to_e4m3" if self.storage == "e4m3" else "to_integer"
        if self.static:
            return found | {one_by_one}
        found |= {"find_scale", self.rounding}
        return found | (set() if self.rounding in VECTORISED[arch] else {one_by_one})

    def decoders(self, dtype: str) -> set[str]:
        """Names of the helpers that reading rows as ``dtype`` needs."""
        return set() if self.storage == dtype else row_reading(self.storage) | row_writing(dtype)


def row_reading(storage: str) -> set[str]:
    """Names of the helpers that turn rows of ``storage`` into f32."""
    return {"widen_f16"} if storage == "f16" else reading(storage)


def row_writing(storage: str) -> set[str]:
    """Names of the helpers that turn rows of f32 into the plain format ``storage``."""
    return {"narrow_f16"} if storage == "f16" else writing(storage)


def row_field(given: Inputs, side: str) -> RowField:
    """K or V as append, gather and prefill see it."""
    quant, address = given.spec.cache.quant(side), given.addresses[side]
    width = "HEAD_DIM" if side == "k" else "V_HEAD_DIM"
    return RowField(
        storage=quant.fmt.storage,
        type=C_TYPES[quant.fmt.storage],
        width=width,
        elements=width if quant.fmt.packed == 1 else f"{width} / {quant.fmt.packed}",
        address=address,
        run=0 if address.stride("d") == 1 else _run(given.record, side),
        together=_together(given.record, side, address),
        scaled=quant.fmt.scaled,
        static=quant.static_scale,
        scale=given.addresses.get(f"{side}_scale"),
        block=quant.d_block or 0,
        qmax=quant.fmt.qmax,
    )


def codec_answers(target: Target, helpers: set[str]) -> dict[str, Any]:
    """What the macros of ``cpp/_codec.jinja`` ask, whatever the op."""
    return {
        "codec_file": f"cpp/_isa_codec_{target.arch}.jinja",
        "scale_helpers": SCALE_HELPERS,
        # Roundings may call the conversion of one number.
        "helper_names": sorted(helpers, key=lambda name: (name.startswith("round_"), name)),
        "to_f32": to_f32,
        "from_f32": from_f32,
    }


def append_answers(given: Inputs) -> Answers:
    """Constants and answers of the append template; the variant is the type of the new rows."""
    spec, arch = given.spec, given.target.arch
    sides = spec.cache.fields
    fields = {side: row_field(given, side) for side in sides if spec.direct(side)}
    encoders = {side: encode_parts(spec, given.addresses, side) for side in sides if side not in fields}
    rows = tuple(value_row(spec, given.addresses, side) for side in encoders)
    parts = [part for found in encoders.values() for part in found]
    rope = rotation(spec.attention, "post")
    numbers = dict.fromkeys(sides, given.variant)
    if rope:
        # Rows are rotated one at a time, in f32.
        numbers["k"] = "f32"
        fields |= {side: replace(field, together=1) for side, field in fields.items() if side == "k"}
    dynamic = any(field.scaled and not field.static for field in fields.values())
    finds = any(part.scaled and not part.static for part in parts)
    least = given.schedule.int("parallel_rows")
    more = [Constant("PARALLEL_ROWS", least, "rows from which several threads are used")]
    more += rope.constants if rope else ()
    if dynamic or finds:
        more.append(Constant("SMALLEST_AMAX", ZERO_BLOCK_AMAX, "a block below this is zero"))
    more += raw_constants(spec)
    helpers = {name for side, field in fields.items() for name in field.encoders(numbers[side], arch)}
    helpers |= row_reading(given.variant) if rope else set()
    helpers |= _value_helpers(spec, given, rows, encoders, numbers)
    own = {name for part in parts for name in part.helpers} | {name for row in rows for name in row.writers}
    return tuple(more), {
        "fields": fields,
        "sides": sides,
        "encoders": encoders,
        "encode_helpers": own,
        "number_dtypes": numbers,
        "rope": rope,
        "raw": spec.cache.raw,
        "in_dtype": given.variant,
        "quantised": any(field.scaled for field in fields.values()) or any(part.scaled for part in parts),
        "dynamic_scales": dynamic or finds,
        "rules": rules,
        "c_types": C_TYPES,
        **value_answers(rows, given.target),
        "value_helpers": tuple(name for name in VALUE_HELPERS if name in own),
        **codec_answers(given.target, helpers),
    }


VALUE_HELPERS = ("small_to_f32", "e8m0_to_f32", "widen_half", "hadamard", "closed_end")
"""Macros of ``cpp/_values.jinja`` that an append may need."""


def _value_helpers(
    spec: Spec,
    given: Inputs,
    rows: tuple[ValueRow, ...],
    encoders: Mapping[str, tuple[EncodePart, ...]],
    numbers: Mapping[str, str],
) -> set[str]:
    """Names of the row conversions that sides without writers of their own need."""
    found: set[str] = set()
    for row in rows:
        found |= row_reading(numbers[row.side]) | row_reading(given.variant)
        if row.raw:
            found |= row_reading(row.raw_dtype) | row_writing(row.raw_dtype)
    for part in (part for parts in encoders.values() for part in parts):
        found |= row_writing(part.narrow) if part.narrow else set()
        if any(s and "bf16_to_f32" in s.load for s in (part.values.scale, part.values.low)):
            found.add("bf16_to_f32")
    return found


def gather_answers(given: Inputs) -> Answers:
    """Answers of the gather template; the variant is the type of the rows it writes."""
    spec = given.spec
    direct = [side for side in spec.cache.fields if spec.direct(side)]
    fields = {side: row_field(given, side) for side in direct}
    rows = tuple(value_row(spec, given.addresses, side) for side in spec.cache.fields if side not in direct)
    helpers = {name for field in fields.values() for name in field.decoders(given.variant)}
    helpers |= {name for row in rows for name in row.scalars}
    if rows and given.variant != "f32":
        helpers |= row_writing(given.variant)
    quantised = any(
        spec.cache.quant(side).fmt.scaled or spec.cache.quant(side).segments for side in spec.cache.fields
    )
    return raw_constants(spec), {
        "fields": fields,
        "sides": spec.cache.fields,
        "raw": spec.cache.raw,
        "out_dtype": given.variant,
        "out_type": C_TYPES[given.variant],
        "quantised": quantised,
        **value_answers(rows, given.target),
        **codec_answers(given.target, helpers),
    }


def _run(record: PageRecord, side: str) -> int:
    """Elements along d that lie side by side in a page where the whole row does not."""
    last = record.plane(side).axes[-1]
    return last.extent or 1 if last.axis.dim == "d" else 1


def _together(record: PageRecord, side: str, address: Address) -> int:
    last = record.plane(side).axes[-1]
    beside = last.axis.dim == "tok" and address.stride("d") == last.extent
    return last.extent if beside and last.extent in (2, 4, 8) else 1
