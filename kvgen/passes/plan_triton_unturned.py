"""Keys that are stored unrotated, rotated to their positions when attention reads them.

A tile is loaded, widened to f32, rotated by the table's row of each key's position and brought to the type of
the dot. Elements that turn together are two operands ("lanes"): halves of a row are tiles of their own,
neighbours are the even and odd elements of one tile, nibbles of a byte are halves already. A scale for the
whole row passes through a rotation, so scales still multiply the score column.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.errors import UnsupportedError
from kvgen.ir import Spec, Target
from kvgen.passes.plan_triton_codec import Reader
from kvgen.passes.plan_triton_parts import DPart
from kvgen.passes.plan_triton_tiles import Side
from kvgen.passes.plan_triton_types import store_text, widen_text


@dataclass(frozen=True)
class Pair:
    """Two operands whose elements are rotated together."""

    first: str
    """Tag of the one, as in ``k0_TD``."""
    second: str
    index: str
    """Name of the angles' numbers, [D]."""
    exists: str
    """Condition under which they exist; empty where all do."""


@dataclass(frozen=True)
class Turning:
    """How the keys of one kernel are rotated."""

    pairs: tuple[Pair, ...]
    split: bool
    """Whether a tile falls apart into even and odd elements."""
    half: int
    """Angles of a position: its sines follow so many cosines."""
    tiles: frozenset[str]
    """Tags of the tiles that are rotated."""
    widen: str
    """Text around a loaded tile that makes f32 of it."""
    first: str
    """Text of the first element of a pair, rotated, in the type of the dot; and of the second."""
    second: str


def reads_unturned(spec: Spec) -> bool:
    """Whether attention rotates keys."""
    rope = spec.attention.rope
    return rope is not None and rope.stored == "pre"


def aligned_table(spec: Spec) -> frozenset[str]:
    """Values that are promised to be multiples of 16, so that angles are loaded 16 bytes at a time."""
    rope = spec.attention.rope
    if rope is None or rope.stored != "pre" or rope.dim % 16:
        return frozenset()
    return frozenset({"param_rope_table", "param_rope_table_stride_kv"})


def check_turning(spec: Spec) -> None:
    """Raise UnsupportedError for what Triton kernels cannot rotate when they read it."""
    rope, k = spec.attention.rope, spec.cache.k
    assert rope is not None
    what, instead = 'attention.rope.stored = "pre"', 'rope.stored = "post" works: append rotates keys once'
    if spec.cache.alias:
        raise UnsupportedError(f"{what} with cache.v.alias: V would have to be the unrotated part; {instead}")
    if k.d_block is not None:
        raise UnsupportedError(
            f"{what} with scales for {k.d_block} elements of cache.k: elements of two scales would rotate "
            f"together; a scale for each row (group = {{ tok = 1, head = 1 }}), or {instead}"
        )
    if spec.attention.qk == "int8":
        raise UnsupportedError(
            f'{what} with qk = "int8": rotated keys are no codes; qk = "exact", or {instead}'
        )
    if k.fmt.packed > 1 and (rope.pairing != "half" or rope.dim != spec.attention.head_dim):
        raise UnsupportedError(
            f"{what} with cache.k.format = {k.format!r}: a byte holds elements half a row apart, so only "
            f'pairing = "half" with dim = head_dim = {spec.attention.head_dim} can rotate; {instead}'
        )


def turned_cuts(spec: Spec) -> list[int]:
    """Stored elements at which tiles of K must end."""
    rope = spec.attention.rope
    assert rope is not None
    if spec.cache.k.fmt.packed > 1:
        return []
    return [rope.dim // 2, rope.dim] if rope.pairing == "half" else [rope.dim]


def turning_for(spec: Spec, side: Side, reader: Reader, compute: str, target: Target) -> Turning:
    """How the tiles of ``side`` are rotated; the dot takes ``compute``."""
    rope, k = spec.attention.rope, spec.cache.k
    assert rope is not None
    half = rope.dim // 2
    split = rope.pairing == "interleaved"
    tiles = [tile for tile in side.tiles if tile.part.start < rope.dim]
    if split or k.fmt.packed > 1:
        pairs = [(tile.part, tile.lanes[0].tag, tile.lanes[1].tag) for tile in tiles]
    else:
        low, high = tiles[: len(tiles) // 2], tiles[len(tiles) // 2 :]
        pairs = [(a.part, a.lanes[0].tag, b.lanes[0].tag) for a, b in zip(low, high, strict=True)]
    return Turning(
        pairs=tuple(Pair(one, two, _index(part, split), _exists(part, split)) for part, one, two in pairs),
        split=split,
        half=half,
        tiles=frozenset(tile.part.tag for tile in tiles),
        widen=widen_text(reader.kind or k.fmt.storage, "f32", target),
        first=store_text("(a * cos - b * sin)", compute, target),
        second=store_text("(b * cos + a * sin)", compute, target),
    )


def _index(part: DPart, split: bool) -> str:
    return f"k_{'pair' if split else 'd'}{part.tag}_D"


def _exists(part: DPart, split: bool) -> str:
    if not part.padded:
        return ""
    return f"({_index(part, split)} < {(part.start + part.valid) // (1 + split)})[None, :]"
