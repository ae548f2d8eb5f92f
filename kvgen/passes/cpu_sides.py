"""K and V as decode reads them: panels, rows where they lie, or staged rows.

A side has one of four forms. ``panel``: vectors of keys, read where they lie (``cpu_panels``). Rows: vectors
run along d, which must be contiguous. Staged: a tile's rows are first copied, and unpacked where no vector
operation reads the format, to rows in the thread's scratch: right for every layout, fast for none. Values:
a format without operands of its own is staged as the f32 numbers that its codes stand for (``cpu_values``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.ir import Spec
from kvgen.passes.address import Address
from kvgen.passes.cpu_attention import Inputs
from kvgen.passes.cpu_panels import Panel, k_panel, v_panel
from kvgen.passes.cpu_rope import rotation
from kvgen.passes.cpu_text import C_TYPES, to_f32
from kvgen.passes.cpu_values import ValueRow, value_row
from kvgen.passes.lower import FoldSite, fold_site


@dataclass(frozen=True)
class Stage:
    """How one element of a staged row is read."""

    text: str = ""
    """The element, from ``row``, ``scales`` and ``d``."""
    plain: bool = False
    """Whether it is copied as it is."""
    half: str = ""
    """Elements of half a row where one stored element holds two codes."""
    low: str = ""
    high: str = ""
    scale: Address | None = None
    """Where the scales of blocks of d lie that are multiplied in; None for scales that fold elsewhere."""

    @property
    def scaled(self) -> bool:
        """Whether scales are multiplied in."""
        return self.scale is not None


@dataclass(frozen=True)
class Side:
    """One of K and V as decode reads it."""

    panel: Panel | None
    staged: bool
    stage: Stage
    row_type: str
    """C++ type of a row's elements as the kernels see them."""
    row_format: str
    """Their storage type."""
    pairs: bool
    """Whether bf16 pairs are multiplied without conversion."""
    column: bool
    """Whether each key has a scale that goes into its score or weight."""
    blocks: int
    """Scales of a key."""
    value: ValueRow | None = None
    """How staged rows are read where they become numbers, scales and all."""


def sides(given: Inputs, lanes: int) -> tuple[Side, Side]:
    """K and V. Where V is part of K, rows of K serve both, staged or not, unless they are rotated."""
    k, v = (_side(given, side, lanes) for side in ("k", "v"))
    if rotation(given.spec.attention, "pre"):
        return _turned(given, k), v
    return k, replace(v, staged=False) if given.spec.cache.alias and not k.panel else v


def fold(spec: Spec, side: str) -> FoldSite:
    """Where the scale of ``k`` or ``v`` enters the attention; nowhere where numbers are staged."""
    return fold_site(spec, side) if spec.direct(side) else FoldSite("none")


def _turned(given: Inputs, k: Side) -> Side:
    """K whose rows are rotated to their positions once they are staged, as f32."""
    if k.value:
        return k
    quant, address = given.spec.cache.k, given.addresses["k"]
    stage, _ = _stage(given.spec, "k", address, given.addresses.get("k_scale"))
    if stage.plain:
        stage = Stage(text=to_f32(quant.fmt.storage, f"row[{address.c(d='d')}]"))
    column = fold_site(given.spec, "k").site == "score_column" and not quant.d_block
    return replace(
        k,
        panel=None,
        staged=True,
        stage=stage,
        row_type="float",
        row_format="f32",
        pairs=False,
        column=column,
        blocks=1,
    )


def _side(given: Inputs, side: str, lanes: int) -> Side:
    """The form of ``k`` or ``v``: panels where the layout has them, else rows, staged where they must be."""
    spec, target, address = given.spec, given.target, given.addresses[side]
    if not spec.direct(side):
        value = value_row(spec, given.addresses, side)
        return Side(None, True, Stage(), "float", "f32", False, False, 1, value)
    quant = spec.cache.quant(side)
    # A bf16 query over bf16 rows multiplies pairs without conversion; weights are then rounded to bf16 too.
    pairs = "bf16" in target.features and spec.attention.q_dtype == "bf16" and quant.format == "bf16"
    find = k_panel if side == "k" else v_panel
    panel = find(spec, given.record, target, address, lanes, pairs)
    fold = fold_site(spec, side)
    column = fold.site in ("score_column", "weight_column")
    width = spec.attention.head_dim if side == "k" else spec.attention.v_head_dim
    storage = quant.fmt.storage
    blocks = width // fold.block if fold.block else 1
    if panel:
        return Side(panel, False, Stage(), C_TYPES[storage], storage, pairs, column, blocks)
    stage, row_format = _stage(spec, side, address, given.addresses.get(f"{side}_scale"))
    staged = address.stride("d") != 1 or not stage.plain
    return Side(None, staged, stage, C_TYPES[row_format], row_format, pairs, column and blocks == 1, 1)


def _stage(spec: Spec, side: str, address: Address, scale: Address | None) -> tuple[Stage, str]:
    """How a staged row is read, and the storage type of what it becomes."""
    quant = spec.cache.quant(side)
    at = address.c(d="d")
    if quant.fmt.packed == 2:
        half = (spec.attention.head_dim if side == "k" else spec.attention.v_head_dim) // 2
        low, high = "(int8_t)(codes << 4) >> 4", "(int8_t)codes >> 4"
        if not quant.d_block:
            return Stage(text="codes", half=str(half), low=low, high=high), "int8"
        assert scale is not None
        low, high = (
            f"(float)({code}) * scales[{scale.c(d=d)}]" for code, d in ((low, "d"), (high, f"({half} + d)"))
        )
        return Stage(text="codes", half=str(half), low=low, high=high, scale=scale), "f32"
    if quant.d_block:
        assert scale is not None
        value = to_f32(quant.fmt.storage, f"row[{at}]")
        return Stage(text=f"{value} * scales[{scale.c(d='d')}]", scale=scale), "f32"
    return Stage(text=f"row[{at}]", plain=True), quant.fmt.storage
